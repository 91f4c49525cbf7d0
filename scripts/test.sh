#!/usr/bin/env bash
# Sets up the environment and runs every check and test. Arguments are passed on to pytest.
set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly project_root
# shellcheck source=scripts/lib/terminal.sh
source "$project_root/scripts/lib/terminal.sh"
# shellcheck source=scripts/lib/environment.sh
source "$project_root/scripts/lib/environment.sh"

main() {
    cd "$project_root"
    environment_ensure "$project_root"
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
