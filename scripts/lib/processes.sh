# shellcheck shell=bash
# Processes that this launcher started, by the session that each of them leads. Needs terminal.sh, the settings of
# cluster.sh, and from ray_node.sh ray_node_sweep and process_notes, the file in which this node's processes are noted.
# shellcheck disable=SC2154 # ray_node.sh sets process_notes, EXIT_RAY

readonly PROCESS_VANISH_S=10 # how long killed processes are waited for
process_fields=()
process_lock="" # file descriptor of the lock that keeps the node for this launcher

# Reads the state of process PID into process_fields: state, parent, group, session and so on. Fails if there is none.
# It starts no command: on a busy machine, one for every process that is looked at would take its time.
process_read() {
    local stat=""
    { IFS= read -rd '' stat <"/proc/$1/stat"; } 2>/dev/null || [[ -n $stat ]] || return 1
    read -ra process_fields <<<"${stat##*) }"
}

# Prints when process PID was born, in clock ticks since boot; nothing if there is none.
process_birth() {
    ! process_read "$1" || printf '%s\n' "${process_fields[19]}"
}

# Whether process PID runs. kill -0 reaches one that has ended too, until its parent has asked how.
process_runs() {
    process_read "$1" && [[ ${process_fields[0]} != [ZX] ]]
}

# Prints the living processes of the session that process PID leads or led.
process_session() {
    local folder
    for folder in /proc/[0-9]*; do
        process_read "${folder#/proc/}" || continue
        # The leader's number names the session.
        [[ ${process_fields[3]} != "$1" || ${process_fields[0]} == [ZX] ]] || printf '%s\n' "${folder#/proc/}"
    done
}

# Ends the session that process PID leads: asks the leader, waits, then kills what is left and sees it go.
process_end_session() {
    local pid=$1 begun=$SECONDS member members
    kill -TERM "$pid" 2>/dev/null || true
    while members=$(process_session "$pid") && [[ -n $members ]]; do
        if ((SECONDS - begun >= STOP_TIMEOUT_S)); then
            for member in $members; do
                kill -KILL "$member" 2>/dev/null || true
            done
            ((SECONDS - begun < STOP_TIMEOUT_S + PROCESS_VANISH_S)) || return 0
        fi
        sleep "$POLL_S"
    done
}

# Keeps this node for this launcher, so that a second start does not end what the first one runs. The kernel gives the
# lock back when the launcher ends, however it ends; nothing that it starts inherits it.
process_keep_node() {
    exec {process_lock}<>"$process_notes.lock"
    flock --nonblock "$process_lock" ||
        quit "$EXIT_RAY" "This node already runs a job (process $(cut -d ' ' -f 1 "$process_notes.lock")) of yours with this RAY_PORT. Wait for its end, stop it with --stop, or set another RAY_PORT for one of them on all nodes."
    printf '%s %s\n' "$$" "$(process_birth "$$")" >"$process_notes.lock"
}

# Ends a launcher that runs on this node, with what it runs, and what an earlier one left behind.
process_stop_node() {
    local pid birth
    if [[ ! -e $process_notes.lock ]]; then
        say "this launcher has no process on this node"
        return
    fi
    exec {process_lock}<>"$process_notes.lock"
    if ! flock --nonblock "$process_lock"; then
        # It may be about to write its name, or end at any time.
        read -r pid birth <"$process_notes.lock" || true
        if [[ -n $birth && $(process_birth "$pid") == "$birth" ]]; then
            say "ending the job of process $pid"
            kill -TERM "$pid" 2>/dev/null || true
            # It ends the training, then Ray, and each may take its time.
            flock --wait $((2 * STOP_TIMEOUT_S + 10)) "$process_lock" || kill -KILL "$pid" 2>/dev/null || true
        fi
    fi
    process_end_noted
}

# Turns this shell, a background one, into a command in a session of its own. It notes itself first, so that a later start
# can end it even if this one is killed at once.
process_become() {
    local pid=$BASHPID
    exec {process_lock}>&-
    printf '%s %s\n' "$pid" "$(process_birth "$pid")" >>"$process_notes"
    exec setsid "$@"
}

# Ends what an earlier start left behind. A process that only has the number of one of ours is left alone.
process_end_noted() {
    local pid birth
    [[ -r $process_notes ]] || return 0
    while read -r pid birth; do
        if [[ -n ${birth:-} && $(process_birth "$pid") == "$birth" ]]; then
            say "ending process $pid, left by an earlier start"
            process_end_session "$pid"
        fi
    done < <(tac "$process_notes")
    ray_node_sweep
    rm -f "$process_notes"
}
