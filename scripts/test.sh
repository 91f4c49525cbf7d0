#!/usr/bin/env bash
# Sets up the environment and runs every check and test. See --help.
set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly project_root
# shellcheck source=scripts/lib/terminal.sh
source "$project_root/scripts/lib/terminal.sh"
# shellcheck source=scripts/lib/arguments.sh
source "$project_root/scripts/lib/arguments.sh"
# shellcheck source=scripts/lib/environment.sh
source "$project_root/scripts/lib/environment.sh"
# shellcheck source=scripts/lib/documentation.sh
source "$project_root/scripts/lib/documentation.sh"

# Many tests wait for a process or a limit of time, so three processes share two cores where all tests are run.
readonly SHARING=(--numprocesses=3 --dist=loadfile --no-loadscope-reorder)

usage() {
    cat <<'USAGE'
Usage: bash scripts/test.sh [--fast | --measure | --measure-new |
                             PYTEST ARGUMENTS...]
       bash scripts/test.sh --stack 2026 [--chip NAME] [--fast |
                             PYTEST ARGUMENTS...]

Sets up .venv/ and .venv.docs/, runs ruff, mypy, import-linter and shellcheck,
and then the tests: all of them without arguments, as CI does. Unknown arguments
go to pytest.

  --stack NAME      2026: set up .venv-2026/ and run that stack's tests alone,
                    in tests/stack_2026/ and what is listed there
  --chip NAME       with --stack 2026, a2 (default) or a3: the chip to emulate
  --fast            skip slow and exhaustive tests, and expensive files
  --measure         run all tests and write each file's cost to
                    tests/durations.json
  --measure-new     run the tests of files that are not in there, and add them
  --exhaustive      include the tests that take many minutes
  FILE, -k TEXT     select tests; .venv/bin/python -m pytest --help lists all
                    of pytest's options
  --help, -h        print this, and set up nothing

Examples:
  bash scripts/test.sh --fast
  bash scripts/test.sh tests/overlay -k pins
  bash scripts/test.sh --stack 2026

Exit codes: 0 all passed; 1 a check or test failed; 2 the environment cannot be
set up, or arguments are rejected.
USAGE
}

# Sets `sharing` to the options that let processes share the tests, if the arguments select no tests of their own.
share_unless_selected() {
    sharing=()
    if (($# == 0)) || [[ $* =~ ^--(fast|measure|measure-new)$ ]]; then
        sharing=("${SHARING[@]}")
    fi
}

# Runs the tests of another stack than the default: all that are for it, unless the arguments name a file or a folder.
run_stack() {
    local stack=$1 chip=$2 argument before='' tools tests=() sharing
    shift 2
    environment_ensure "$project_root" "$stack"
    tools=$(environment_folder "$project_root" "$stack")/bin
    mapfile -t tests < <(grep -v '^#' "$project_root/tests/stack_$stack/also.txt")
    tests=("tests/stack_$stack" "${tests[@]}")
    share_unless_selected "$@"
    for argument in "$@"; do
        [[ $before == -[km] || ! -e ${argument%%::*} ]] || tests=()
        before=$argument
    done
    become_pytest "$tools/python" "$stack" "$chip" "${sharing[@]}" "${tests[@]}" "$@"
}

# Becomes pytest, with a rehearsal's environment and nothing of the user's Ray or Python path. Python reads the folder
# tests/interpreter when it starts, as do the processes that tests start.
become_pytest() {
    local python=$1 lines settings arguments=(--stack "$2")
    [[ -z $3 ]] || arguments+=(--chip "$3")
    shift 3
    lines=$("$python" -m rehearsal.environment "${arguments[@]}")
    mapfile -t settings <<<"$lines"
    unset RAY_ADDRESS
    exec env "${settings[@]}" PYTHONPATH="$project_root:$project_root/tests/interpreter" \
        "$python" -m pytest "$@" </dev/null
}

main() {
    local stack=$ENVIRONMENT_DEFAULT_STACK chip=
    while (($#)); do
        case $1 in
            --help | -h) usage; return ;;
            --stack | --chip)
                argument_require_value "$1" $#
                case $1 in
                    --stack) environment_require_stack "$2"; stack=$2 ;;
                    --chip) argument_require_chip "$2"; chip=$2 ;;
                esac
                shift 2
                ;;
            *) break ;;
        esac
    done
    cd "$project_root"
    if [[ $stack != "$ENVIRONMENT_DEFAULT_STACK" ]]; then
        [[ " $* " != *" --measure"* ]] || fail "--measure is for the tests of stack $ENVIRONMENT_DEFAULT_STACK. Remove --stack."
        run_stack "$stack" "${chip:-a2}" "$@"
    fi
    [[ -z $chip ]] || fail "--chip needs --stack 2026: the tests of stack $ENVIRONMENT_DEFAULT_STACK choose their chips."
    environment_ensure "$project_root"
    documentation_ensure "$project_root"
    local tools=$project_root/.venv/bin shell_scripts
    mapfile -d '' shell_scripts < <(find scripts deploy .ci -type f \( -name '*.sh' -o -path '.ci/run' \) -print0)
    "$tools/ruff" check .
    "$tools/ruff" format --check .
    bash scripts/lib/together.sh "$tools/mypy" \
        --and "$tools/lint-imports" --no-logo --cache-dir .cache/import_linter \
        --then "$tools/shellcheck" --external-sources "${shell_scripts[@]}"
    local sharing
    share_unless_selected "$@"
    become_pytest "$tools/python" "$stack" "" "${sharing[@]}" "$@"
}

main "$@"
