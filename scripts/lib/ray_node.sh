# shellcheck shell=bash
# Ray on this node: one head or worker of our own, started in the foreground of a child so that it ends with it.
# Never `ray stop`: it ends the Ray of every user. Needs terminal.sh, network.sh, processes.sh and the
# settings of cluster.sh.
# shellcheck disable=SC2034,SC2154 # variables of the other files of the launcher

readonly EXIT_RAY=3 EXIT_MISSING=4 EXIT_RAY_ENDED=5
# `ray start --block` looks after its processes once a second; a busy machine takes longer.
readonly RAY_NOTICES_S=5

# Works out this node's folder and command of Ray.
ray_node_prepare() {
    local user
    user=$(id -un)
    # One folder a user and port: Ray's sockets lie in it, and their paths may have no more than 107 bytes.
    ((${#user} <= 20)) || user=$(id -u)
    declare -g ray_folder=/tmp/ray-$user-$RAY_PORT process_notes ray_process=0
    declare -ga ray_command
    # What the job's processes put into the folder for temporary files goes with them.
    [[ -n ${cluster_given[TMPDIR]:-} ]] || cluster_environment+=("TMPDIR=$ray_folder/t")
    process_notes=$ray_folder/$network_address.processes
    ray_command=(python3 scripts/internal/start_ray.py start --block --disable-usage-stats)
    ray_command+=(--node-ip-address="$network_address")
    ray_command+=(--resources="{\"NPU\": $DIES_PER_NODE}" --num-cpus="$(ray_node_slots)")
    if [[ $network_role == head ]]; then
        ray_command+=(--head --port="$RAY_PORT" --temp-dir="$ray_folder/r")
        ray_command+=(--include-dashboard=false)
    else
        ray_command+=(--address="$MASTER_ADDR:$RAY_PORT")
    fi
}

# Makes Ray's folder. Others may write in /tmp too, so it has to be ours alone: Ray opens its own, inside, to everybody.
ray_node_folder() {
    (umask 077 && mkdir -p "$ray_folder") || fail "$ray_folder cannot be created. Ray needs it for its sockets and logs."
    [[ -d $ray_folder && ! -L $ray_folder && -O $ray_folder ]] ||
        fail "$ray_folder belongs to another user. Remove it, or choose another RAY_PORT on all nodes."
    chmod 700 "$ray_folder"
}

# Prints the CPU slots of a node: Ray counts logical ones, and verl places one worker per die and two actors beside them.
ray_node_slots() {
    local cores least=$((DIES_PER_NODE + 2))
    cores=$(nproc)
    printf '%d\n' $((cores > least ? cores : least))
}

# Removes what ended processes of this node's job have left: their temporary files and, named after the folder of those,
# their shared memory.
ray_node_sweep() {
    local name=${ray_folder#/}/t
    rm -rf "$ray_folder/t" "/dev/shm/psm_${name//\//-}_"*
}

# Starts Ray; ray_process is its process, the leader of a session of its own. LOG gets what it prints.
ray_node_start() {
    local log=$1 status=0
    if [[ $network_role == head ]] && network_answers "$network_address" "$RAY_PORT"; then
        quit "$EXIT_RAY" "$network_address:$RAY_PORT is taken by $(network_listener "$RAY_PORT"), and not by an earlier start of this launcher: stop that Ray, or choose another RAY_PORT on all nodes."
    fi
    # What Ray noted of its last start, which has ended. A node that had joined that one ends a little later, and Ray
    # takes its process for another head where this machine sees it.
    [[ $network_role != head ]] || rm -f "$ray_folder/r/ray_current_cluster"
    process_become "${ray_command[@]}" >>"$log" 2>&1 &
    ray_process=$!
    [[ $network_role == head ]] || return 0
    network_wait "$network_address" "$RAY_PORT" "$HEAD_TIMEOUT_S" "$ray_process" "Ray to start" || status=$?
    ((status == 0)) || quit "$EXIT_RAY" "Ray did not start on this node; $(ray_node_reason "$log")."
}

# Prints why Ray ended: the last error that start_ray.py wrote into LOG, or where to look for the reason.
ray_node_reason() {
    local said
    said=$(sed -n 's/^error: //p' "$1" 2>/dev/null | tail -n 1)
    if [[ -n $said ]]; then
        printf '%s; the log is %s' "${said%.}" "$1"
    else
        printf 'the reason is in %s' "$1"
    fi
}

# Whether our own Ray has ended, or the joined one does not answer, after the training has failed. If one of Ray's
# processes is gone, the training may notice that before Ray does.
ray_node_ended() {
    local begun=$SECONDS
    if [[ -n $joined ]]; then
        ! network_answers "$MASTER_ADDR" "$RAY_PORT"
        return
    fi
    while process_runs "$ray_process"; do
        ((SECONDS - begun < RAY_NOTICES_S)) || return 1
        sleep "$POLL_S"
    done
}

# Ends our own Ray, if there is one, and waits until all of its processes have gone.
ray_node_stop() {
    # A second signal must not cut this short.
    trap '' INT TERM HUP QUIT
    ((ray_process)) || [[ -n $joined ]] || return 0
    ((ray_process == 0)) || process_end_session "$ray_process"
    ray_process=0
    ray_node_sweep
    rm -f "$process_notes"
}
