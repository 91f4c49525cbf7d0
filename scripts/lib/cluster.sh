# shellcheck shell=bash
# The settings of a cluster, from one file of NAME=value lines. Needs terminal.sh and arguments.sh.
# shellcheck disable=SC2154 # network.sh sets network_interface

# What the launcher itself reads; every other name in the file is exported to the processes of the job.
readonly CLUSTER_SETTINGS=(
    MASTER_ADDR SOCKET_IFNAME NODES DIES_PER_NODE MODEL_PATH TRAIN_FILES TEST_FILES OUTPUT_DIR CANN_ENV JEMALLOC
    RAY_PORT RAY_TLS_DIR ALLOW_PUBLIC_ADDRESS HEAD_TIMEOUT_S NODES_TIMEOUT_S STOP_TIMEOUT_S POLL_S
)
readonly CLUSTER_NUMBERS=(NODES DIES_PER_NODE RAY_PORT HEAD_TIMEOUT_S NODES_TIMEOUT_S STOP_TIMEOUT_S)

# Sets the launcher's settings as variables of this shell and keeps the exports in cluster_exports (NAME=value).
cluster_read() {
    local file=$1 line name value
    argument_require_file --cluster "$file"
    declare -gA cluster_given=()
    declare -ga cluster_names=() cluster_exports=()
    while IFS= read -r line || [[ -n $line ]]; do
        line=${line%%#*}
        line="${line#"${line%%[![:space:]]*}"}"
        line="${line%"${line##*[![:space:]]}"}"
        [[ -n $line ]] || continue
        [[ $line =~ ^([A-Za-z][A-Za-z0-9_]*)=(.*)$ ]] || fail "$file: \"$line\" is no NAME=value line."
        name=${BASH_REMATCH[1]} value=${BASH_REMATCH[2]}
        [[ -z ${cluster_given[$name]+set} ]] || fail "$file sets $name twice; keep one."
        cluster_given[$name]=$value
        cluster_names+=("$name")
        if [[ " ${CLUSTER_SETTINGS[*]} " == *" $name "* ]]; then
            declare -g "$name=$value"
        else
            cluster_exports+=("$name=$value")
        fi
    done <"$file"
    cluster_check "$file"
}

# Fails unless every setting is given, filled in and of its kind.
cluster_check() {
    local file=$1 name
    for name in "${CLUSTER_SETTINGS[@]}"; do
        [[ -n ${cluster_given[$name]:-} ]] || fail "$file does not set $name; scripts/env/a3_256_dies.env says what it is."
    done
    for name in "${cluster_names[@]}"; do
        [[ ${cluster_given[$name]} != *[\<\>]* ]] || fail "$file: $name is still the placeholder ${cluster_given[$name]}; fill it in."
    done
    for name in "${CLUSTER_NUMBERS[@]}"; do
        argument_require_number "$name in $file" "${cluster_given[$name]}" 1
    done
    [[ $POLL_S =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail "$file: POLL_S is \"$POLL_S\": give seconds, such as 5 or 0.5."
    [[ $ALLOW_PUBLIC_ADDRESS == yes || $ALLOW_PUBLIC_ADDRESS == no ]] || fail "$file: ALLOW_PUBLIC_ADDRESS is yes or no."
    ((RAY_PORT <= 65535)) || fail "$file: RAY_PORT is $RAY_PORT: a port is at most 65535."
}

# Exports what the software of the job reads, after the vendor's own scripts, so that the file has the last word.
cluster_export() {
    local script scripts=() entry
    if [[ $CANN_ENV != none ]]; then
        IFS=: read -ra scripts <<<"$CANN_ENV"
    fi
    for script in "${scripts[@]}"; do
        [[ -r $script ]] || fail "CANN_ENV: $script cannot be read; install CANN there, correct the path, or set none."
        # The vendor's scripts read variables that need not exist.
        set +u
        # shellcheck source=/dev/null
        source "$script"
        set -u
    done
    for entry in "${cluster_exports[@]}"; do
        export "${entry?}"
    done
    if [[ $JEMALLOC != none ]]; then
        [[ -r $JEMALLOC ]] || fail "JEMALLOC: $JEMALLOC cannot be read; install jemalloc, correct the path, or set none."
        export LD_PRELOAD=$JEMALLOC
    fi
    export HCCL_SOCKET_IFNAME=$network_interface GLOO_SOCKET_IFNAME=$network_interface TP_SOCKET_IFNAME=$network_interface
    if [[ $RAY_TLS_DIR != none ]]; then
        for entry in ca.crt node.crt node.key; do
            [[ -r $RAY_TLS_DIR/$entry ]] || fail "RAY_TLS_DIR: $RAY_TLS_DIR/$entry cannot be read; see docs/cluster.md."
        done
        export RAY_USE_TLS=1 RAY_TLS_CA_CERT=$RAY_TLS_DIR/ca.crt
        export RAY_TLS_SERVER_CERT=$RAY_TLS_DIR/node.crt RAY_TLS_SERVER_KEY=$RAY_TLS_DIR/node.key
    fi
}
