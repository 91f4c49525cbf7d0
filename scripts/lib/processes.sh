# shellcheck shell=bash
# Processes that this launcher started, by the session that each of them leads. Needs terminal.sh and the settings of
# cluster.sh, and process_notes, the file in which this node's processes are noted.
# shellcheck disable=SC2154 # ray_node.sh sets process_notes

# Prints when process PID was born, in clock ticks since boot; nothing if there is none.
process_birth() {
    local stat fields
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
    read -ra fields <<<"${stat##*) }"
    printf '%s\n' "${fields[19]}"
}

# Prints the living processes of the session that process PID leads or led.
process_session() {
    local folder stat fields
    for folder in /proc/[0-9]*; do
        stat=$(cat "$folder/stat" 2>/dev/null) || continue
        read -ra fields <<<"${stat##*) }"
        # State, parent, group, session: the leader's number names the session.
        [[ ${fields[3]} != "$1" || ${fields[0]} == Z ]] || printf '%s\n' "${folder#/proc/}"
    done
}

# Ends the session that process PID leads: asks the leader, waits, then kills what is left.
process_end_session() {
    local pid=$1 begun=$SECONDS member members
    kill -TERM "$pid" 2>/dev/null || true
    while members=$(process_session "$pid") && [[ -n $members ]]; do
        if ((SECONDS - begun >= STOP_TIMEOUT_S)); then
            for member in $members; do
                kill -KILL "$member" 2>/dev/null || true
            done
            return 0
        fi
        sleep "$POLL_S"
    done
}

# Turns this shell, a background one, into a command in a session of its own. It notes itself first, so that a later start
# can end it even if this one is killed at once.
process_become() {
    local pid=$BASHPID
    printf '%s %s\n' "$pid" "$(process_birth "$pid")" >>"$process_notes"
    exec setsid "$@"
}

# Ends what an earlier start left behind. A process that only has the number of one of ours is left alone.
process_end_noted() {
    local pid birth
    [[ -r $process_notes ]] || return 0
    while read -r pid birth; do
        if [[ -n ${birth:-} && $(process_birth "$pid") == "$birth" ]]; then
            say "ending process $pid, which an earlier start left behind"
            process_end_session "$pid"
        fi
    done < <(tac "$process_notes")
    rm -f "$process_notes"
}
