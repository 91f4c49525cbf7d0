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
    { "${second[@]}" && "$@"; } || status=$?
    wait "$!" || status=$?
    return "$status"
}

main "$@"
