#!/usr/bin/env bash
# Runs two commands at the same time, and a third once the second has ended:
# together.sh COMMAND... --and COMMAND... --then COMMAND...
# Waits for all, and fails if one has failed.
set -euo pipefail

main() {
    local first=() second=() status=0
    while [[ $1 != --and ]]; do
        first+=("$1")
        shift
    done
    shift
    while [[ $1 != --then ]]; do
        second+=("$1")
        shift
    done
    shift
    "${first[@]}" &
    # A command in the background ignores both signals. A trap of EXIT would not do: bash then handles every signal that
    # ends it, and a command that it is just starting may lose that signal and go on.
    # shellcheck disable=SC2064 # this command's process
    trap "kill $! 2>/dev/null || true; exit 130" INT
    # shellcheck disable=SC2064
    trap "kill $! 2>/dev/null || true; exit 131" QUIT
    { "${second[@]}" && "$@"; } || status=$?
    wait "$!" || status=$?
    return "$status"
}

main "$@"
