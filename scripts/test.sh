#!/usr/bin/env bash
# Sets up the environment and runs every check and test. See --help.
set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly project_root
# shellcheck source=scripts/lib/terminal.sh
source "$project_root/scripts/lib/terminal.sh"
# shellcheck source=scripts/lib/environment.sh
source "$project_root/scripts/lib/environment.sh"
# shellcheck source=scripts/lib/documentation.sh
source "$project_root/scripts/lib/documentation.sh"

usage() {
    cat <<'USAGE'
Usage: bash scripts/test.sh [--fast | --measure | PYTEST ARGUMENTS...]

Sets up .venv/ and .venv.docs/, runs ruff, mypy, import-linter and shellcheck,
and then the tests: all of them without arguments, as CI does. Unknown arguments
go to pytest.

  --fast            skip slow and exhaustive tests, and expensive files
  --measure         run all tests and write each file's cost to
                    tests/durations.json
  --exhaustive      include the tests that take many minutes
  FILE, -k TEXT     select tests; .venv/bin/python -m pytest --help lists all
                    of pytest's options
  --help, -h        print this, and set up nothing

Examples:
  bash scripts/test.sh --fast
  bash scripts/test.sh tests/overlay -k pins

Exit codes: 0 all passed; 1 a check or test failed; 2 the environment cannot be
set up, or arguments are rejected.
USAGE
}

main() {
    if [[ ${1:-} == --help || ${1:-} == -h ]]; then
        usage
        return
    fi
    cd "$project_root"
    environment_ensure "$project_root"
    documentation_ensure "$project_root"
    local tools=$project_root/.venv/bin shell_scripts
    mapfile -d '' shell_scripts < <(find scripts deploy .ci -type f \( -name '*.sh' -o -path '.ci/run' \) -print0)
    "$tools/ruff" check .
    "$tools/ruff" format --check .
    "$tools/mypy"
    "$tools/lint-imports" --no-logo --cache-dir .cache/import_linter
    "$tools/shellcheck" --external-sources "${shell_scripts[@]}"
    # The tests run as the rehearsal does: with its environment, and nothing of the user's Ray or Python path.
    local settings
    mapfile -t settings < <("$tools/python" -m rehearsal.environment)
    unset RAY_ADDRESS
    # Much of a test is waiting for ranks, so two processes share them where all or the fast tier are run.
    local sharing=()
    if (($# == 0)) || [[ $* == --fast || $* == --measure ]]; then
        sharing=(--numprocesses=2 --dist=loadfile --no-loadscope-reorder)
    fi
    exec env "${settings[@]}" PYTHONPATH="$project_root" "$tools/python" -m pytest "${sharing[@]}" "$@" </dev/null
}

main "$@"
