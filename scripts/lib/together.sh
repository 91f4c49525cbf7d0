#!/usr/bin/env bash
# Runs two commands at the same time: together.sh COMMAND... --and COMMAND...
# Waits for both, and fails if one has failed.
set -euo pipefail

main() {
    local first=() status=0
    while [[ $1 != --and ]]; do
        first+=("$1")
        shift
    done
    shift
    "${first[@]}" &
    "$@" || status=$?
    wait "$!" || status=$?
    return "$status"
}

main "$@"
