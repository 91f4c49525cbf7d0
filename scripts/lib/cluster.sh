# shellcheck shell=bash
# The settings of a cluster, from one file of NAME=value lines. Needs terminal.sh, arguments.sh and settings.sh.
# shellcheck disable=SC2154 # network.sh sets network_interface

# What the launcher itself reads; every other name in the file is exported to the processes of the job.
readonly CLUSTER_SETTINGS=(
    MASTER_ADDR SOCKET_IFNAME NODES DIES_PER_NODE MODEL_PATH TRAIN_FILES TEST_FILES OUTPUT_DIR CANN_ENV JEMALLOC
    RAY_PORT RAY_TLS_DIR ALLOW_PUBLIC_ADDRESS HEAD_TIMEOUT_S NODES_TIMEOUT_S STOP_TIMEOUT_S POLL_S CHIP DIE_MEMORY
)
# What a file may leave out, because it describes 128 Atlas A3 cards unless it says otherwise.
readonly -A CLUSTER_DEFAULTS=([CHIP]=A3 [DIE_MEMORY]=61GiB)
readonly CLUSTER_NUMBERS=(NODES DIES_PER_NODE HEAD_TIMEOUT_S NODES_TIMEOUT_S STOP_TIMEOUT_S)
readonly CLUSTER_FORM='a file of NAME=value lines, such as scripts/env/a3_256_dies.env'
# torch_npu ends a process whose collective has waited this many seconds, unless the process group names another limit,
# and verl's and Megatron's name none (DEFAULT_TIMEOUT of torch_npu's ProcessGroupHCCL.hpp).
readonly CLUSTER_WATCHDOG_S=1800

# Sets the launcher's settings as variables of this shell and keeps the exports in cluster_exports (NAME=value).
cluster_read() {
    local file=$1 name
    argument_require_file --cluster "$file" "$CLUSTER_FORM"
    declare -gA cluster_given=()
    declare -ga cluster_names=() cluster_exports=()
    settings_read "$file" cluster_given cluster_names
    for name in "${!CLUSTER_DEFAULTS[@]}"; do
        [[ -z ${cluster_given[$name]+given} ]] || continue
        cluster_given[$name]=${CLUSTER_DEFAULTS[$name]}
        cluster_names+=("$name")
    done
    cluster_place_head
    for name in "${cluster_names[@]}"; do
        if [[ " ${CLUSTER_SETTINGS[*]} " == *" $name "* ]]; then
            declare -g "$name=${cluster_given[$name]}"
        elif [[ $name != DIST_CKPT_PATH ]]; then # training.sh reads it, which a file may leave out
            cluster_exports+=("$name=${cluster_given[$name]}")
        fi
    done
    cluster_check "$file"
    cluster_take_nodes "$file"
}

# Puts the number of --nodes, which the launcher alone has, in the place of the file's.
cluster_take_nodes() {
    [[ -n ${taken_nodes:-} ]] || return 0
    argument_require_decimal --nodes "$taken_nodes" 1 "$NODES" "$1 sets NODES=$NODES"
    declare -g NODES=$taken_nodes
    cluster_given[NODES]=$taken_nodes
}

# Puts the head of --master or --join, which the launcher alone has, in the place of the file's. A scheduler publishes names
# while it starts the nodes.
cluster_place_head() {
    local host=${master:-} option=--master begun=$SECONDS waits=0 address allowed=${cluster_given[HEAD_TIMEOUT_S]:-0}
    if [[ -n ${joined:-} ]]; then
        [[ -z ${master:-} ]] || fail "--master and --join both name a head. Remove one of them."
        [[ $joined == ?*:* ]] || fail "--join=$joined is invalid. Set it to HOST:PORT of a Ray head, such as 10.0.0.1:6379."
        host=${joined%:*} option=--join
        cluster_given[RAY_PORT]=${joined##*:}
        declare -g RAY_PORT=${joined##*:}
    fi
    [[ -n $host ]] || return 0
    [[ $allowed =~ ^[0-9]{1,9}$ ]] || allowed=0
    until address=$(getent ahostsv4 "$host") && [[ -n $address ]]; do
        ((SECONDS - begun < allowed)) || fail "$option=$host is invalid: the name has no IPv4 address. Correct it."
        ((waits++)) || say "waiting for the address of $host, up to $allowed s"
        sleep 1
    done
    declare -g MASTER_ADDR=${address%%[[:space:]]*}
    cluster_given[MASTER_ADDR]=$MASTER_ADDR
}

# Fails unless every setting is given, filled in and of its kind.
cluster_check() {
    local file=$1 name
    for name in "${CLUSTER_SETTINGS[@]}"; do
        [[ -n ${cluster_given[$name]:-} ]] || fail "$file does not set $name. scripts/env/a3_256_dies.env explains it."
    done
    for name in "${cluster_names[@]}"; do
        [[ ${cluster_given[$name]} != [\"\']* ]] ||
            fail "$file: $name begins with a quote, which would become part of the value. Write it without quotes."
        [[ ${cluster_given[$name]} != *[\<\>]* ]] || fail "$file: $name is still the placeholder ${cluster_given[$name]}. Fill it in."
    done
    for name in "${CLUSTER_NUMBERS[@]}"; do
        argument_require_decimal "$file: $name" "${cluster_given[$name]}" 1 999999999
    done
    argument_require_decimal "$file: RAY_PORT" "$RAY_PORT" 1 65535
    cluster_check_address "$file"
    cluster_check_timeouts "$file"
    [[ $POLL_S =~ ^(0|[1-9][0-9]{0,5})(\.[0-9]{1,6})?$ && $POLL_S =~ [1-9] ]] ||
        fail "$file: POLL_S=$POLL_S is invalid. Set it to seconds, such as 5 or 0.5."
    [[ $CHIP == A2 || $CHIP == A3 ]] || fail "$file: CHIP=$CHIP is invalid. Set it to the family of the dies, A2 or A3."
    [[ $DIE_MEMORY =~ ^[1-9][0-9]{0,14}([KMG]iB)?$ ]] ||
        fail "$file: DIE_MEMORY=$DIE_MEMORY is invalid: not a size. Set it to the memory of a die that tensors can use, such as 61GiB."
    [[ $ALLOW_PUBLIC_ADDRESS == yes || $ALLOW_PUBLIC_ADDRESS == no ]] || fail "$file: ALLOW_PUBLIC_ADDRESS=$ALLOW_PUBLIC_ADDRESS is invalid. Set it to yes or no."
}

# Fails unless MASTER_ADDR is an IPv4 address.
cluster_check_address() {
    local file=$1 part parts
    IFS=. read -ra parts <<<"$MASTER_ADDR"
    [[ ${#parts[@]} == 4 && $MASTER_ADDR != *. ]] || parts=(none)
    for part in "${parts[@]}"; do
        [[ $part =~ ^(0|[1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-5])$ ]] ||
            fail "$file: MASTER_ADDR=$MASTER_ADDR is invalid: nodes compare it with their own address. Set it to the head's IPv4 address."
    done
}

# Fails unless HCCL gives a collective up before torch_npu's watchdog ends the process: what HCCL then writes into the
# plog, which die it waited for, is lost otherwise. Without the variable HCCL waits 1836 s, and with 0 for ever.
cluster_check_timeouts() {
    local file=$1 name=HCCL_EXEC_TIMEOUT
    [[ -n ${cluster_given[$name]:-} ]] ||
        fail "$file does not set $name, and HCCL's default of 1836 s exceeds the $CLUSTER_WATCHDOG_S s of torch_npu's watchdog. Set it to less."
    argument_require_decimal "$file: $name" "${cluster_given[$name]}" 1 $((CLUSTER_WATCHDOG_S - 1)) \
        "torch_npu's watchdog ends a process after $CLUSTER_WATCHDOG_S s"
}

# Works out cluster_scripts, the vendor's scripts to source, and cluster_environment (NAME=value), which is exported after
# them, so that the file has the last word.
cluster_prepare() {
    local entry
    declare -ga cluster_scripts=() cluster_environment=("${cluster_exports[@]}")
    entry=$(settings_cann_scripts "$CANN_ENV")
    [[ -z $entry ]] || mapfile -t cluster_scripts <<<"$entry"
    if [[ $JEMALLOC != none ]]; then
        [[ -r $JEMALLOC ]] || fail "JEMALLOC=$JEMALLOC is invalid: it cannot be read. Install jemalloc, correct the path, or set it to none."
        cluster_environment+=("LD_PRELOAD=$JEMALLOC")
    fi
    cluster_environment+=({HCCL,GLOO,TP}_SOCKET_IFNAME="$network_interface")
    if [[ $RAY_TLS_DIR != none ]]; then
        for entry in ca.crt node.crt node.key; do
            [[ -r $RAY_TLS_DIR/$entry ]] || fail "RAY_TLS_DIR=$RAY_TLS_DIR is invalid: $entry cannot be read. See docs/cluster.md."
        done
        cluster_environment+=(RAY_USE_TLS=1 "RAY_TLS_CA_CERT=$RAY_TLS_DIR/ca.crt")
        cluster_environment+=("RAY_TLS_SERVER_CERT=$RAY_TLS_DIR/node.crt" "RAY_TLS_SERVER_KEY=$RAY_TLS_DIR/node.key")
    fi
}

# Sources and exports what cluster_prepare has worked out.
cluster_export() {
    local entry
    settings_source "${cluster_scripts[@]}"
    for entry in "${cluster_environment[@]}"; do
        export "${entry?}"
    done
}
