#!/usr/bin/env bash
# Shows the report of a run in a browser of this machine while the run goes on. See --help.
set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly project_root
# shellcheck source=scripts/lib/terminal.sh
source "$project_root/scripts/lib/terminal.sh"
# shellcheck source=scripts/lib/arguments.sh
source "$project_root/scripts/lib/arguments.sh"

usage() {
    cat <<'USAGE'
Usage: bash scripts/watch.sh RUN [--port N]

Serves the report of the run in folder RUN at http://127.0.0.1:N/ until Ctrl-C.
The page refreshes itself while the run continues. RUN may still be starting,
or not exist yet: the page then waits for its first step. Only this machine
reaches the page; from another one, use ssh -L N:127.0.0.1:N.

  --port N      port to listen on (default: a free one, which is printed)
  --help        print this

Example:
  bash scripts/watch.sh outputs/rehearsal/latest --port 8080
USAGE
}

main() {
    local run="" port=0 python=$project_root/.venv/bin/python
    while (($#)); do
        case $1 in
            --help) usage; return ;;
            --port)
                argument_require_value "$1" $#
                argument_require_decimal "$1" "$2" 0 65535
                port=$2
                shift 2
                ;;
            -*) fail "Unknown option \"$1\": see --help." ;;
            *)
                [[ -z $run ]] || fail "\"$1\" is a second folder. Pass one run."
                run=$1
                shift
                ;;
        esac
    done
    [[ -n $run ]] || fail "RUN is missing. Pass the output folder of a run (see --help)."
    [[ -d $run || ! -e $run ]] || fail "$run is not a folder. Pass the output folder of a run."
    [[ -x $python ]] || python=python3
    exec "$python" "$project_root/scripts/internal/watch_run.py" "$run" "$port"
}

main "$@"
