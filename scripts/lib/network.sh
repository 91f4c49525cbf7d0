# shellcheck shell=bash
# This node on the network: its interface, its address, its role. Needs terminal.sh, processes.sh
# and the settings of cluster.sh.
# shellcheck disable=SC2034 # what it sets is for the scripts that source it

# Sets network_interface, network_address and network_role (head or worker).
network_find_node() {
    local addresses
    declare -g network_interface=$SOCKET_IFNAME network_address network_role=worker
    addresses=$(ip -o -4 addr show) || fail "The network interfaces cannot be listed. Is the command ip (iproute2) installed?"
    [[ $SOCKET_IFNAME != auto ]] || network_interface=$(network_interface_towards "$MASTER_ADDR" "$addresses")
    network_address=$(awk -v name="$network_interface" '$2 == name { sub("/.*", "", $4); print $4; exit }' <<<"$addresses")
    [[ -n $network_address ]] ||
        fail "SOCKET_IFNAME=$network_interface is invalid: no such interface with an IPv4 address. This node has $(network_summary "$addresses")."
    if [[ -n $joined || $network_address == "$MASTER_ADDR" ]]; then
        network_role="head"
    elif grep -qF " $MASTER_ADDR/" <<<"$addresses"; then
        fail "MASTER_ADDR=$MASTER_ADDR is an address of this node, but not of SOCKET_IFNAME=$network_interface, which has $network_address. Make them agree."
    fi
    [[ $ALLOW_PUBLIC_ADDRESS == yes ]] || network_is_private "$network_address" ||
        fail "$network_address is a public address, and anyone who reaches Ray can run commands as you. Use a private network, or set ALLOW_PUBLIC_ADDRESS=yes."
}

# Prints the interface that has ADDRESS or over which it is reached.
network_interface_towards() {
    local address=$1 addresses=$2 found
    found=$(awk -v address="$address" 'index($4, address "/") == 1 { print $2; exit }' <<<"$addresses")
    [[ -n $found ]] || found=$(ip -o route get "$address" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p') || true
    [[ -n $found ]] || fail "SOCKET_IFNAME=auto is invalid: no interface of this node reaches MASTER_ADDR $address. Set it to the interface."
    printf '%s\n' "$found"
}

# Prints "eth0 10.0.0.1, lo 127.0.0.1".
network_summary() {
    awk '{ sub("/.*", "", $4); printf "%s%s %s", separator, $2, $4; separator = ", " }' <<<"$1"
}

# Whether ADDRESS is of a private network, of loopback, or of a provider's inner network.
network_is_private() {
    local first second
    IFS=. read -r first second _ _ <<<"$1"
    case $first in
        10 | 127) return 0 ;;
        100) ((second >= 64 && second <= 127)) ;;
        169) ((second == 254)) ;;
        172) ((second >= 16 && second <= 31)) ;;
        192) ((second == 168)) ;;
        *) return 1 ;;
    esac
}

# Whether something accepts connections at ADDRESS:PORT.
network_answers() {
    # shellcheck disable=SC2016 # the inner shell expands them
    timeout 2 bash -c 'exec 3<>"/dev/tcp/$1/$2"' _ "$1" "$2" 2>/dev/null
}

# Prints the user of the socket that listens on PORT of this node, as far as the kernel tells.
network_listener() {
    local hexadecimal identifier
    printf -v hexadecimal '%04X' "$1"
    identifier=$(awk -v port=":$hexadecimal" '$4 == "0A" && substr($2, length($2) - 4) == port { print $8; exit }' /proc/net/tcp /proc/net/tcp6 2>/dev/null)
    [[ -z $identifier ]] || id -nu "$identifier" 2>/dev/null || printf 'user %s\n' "$identifier"
}

# Waits until ADDRESS:PORT answers, while process PID lives (0: none to watch); a line of progress every ten seconds.
# Returns 1 after SECONDS_ALLOWED, 2 when the process has ended.
network_wait() {
    local address=$1 port=$2 seconds_allowed=$3 pid=$4 what=$5 begun=$SECONDS shown=$SECONDS
    until network_answers "$address" "$port"; do
        ((pid == 0)) || process_runs "$pid" || return 2
        ((SECONDS - begun < seconds_allowed)) || return 1
        if ((SECONDS - shown >= 10)); then
            shown=$SECONDS
            say "waiting for $what at $address:$port, $((SECONDS - begun)) of $seconds_allowed s"
        fi
        sleep "$POLL_S"
    done
}
