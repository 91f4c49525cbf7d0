#!/usr/bin/env bash
# Regenerates requirements/*.lock and requirements.txt from requirements/*.in, holding every version that is already locked.
# Usage: bash scripts/update_locks.sh [--upgrade]
set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly project_root
cd "$project_root/requirements"

options=(pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header)
if [[ ${1:-} == --upgrade ]]; then
    options+=(--upgrade)
elif (($#)); then
    printf 'error: unknown argument %s; usage: update_locks.sh [--upgrade]\n' "$1" >&2
    exit 2
fi

# The later sets are resolved against the earlier ones: all of them are installed into one environment.
"$project_root/.venv/bin/uv" "${options[@]}" runtime.in -o runtime.lock
"$project_root/.venv/bin/uv" "${options[@]}" -c runtime.lock bootstrap.in -o bootstrap.lock
"$project_root/.venv/bin/uv" "${options[@]}" -c runtime.lock dev.in -o dev.lock
"$project_root/.venv/bin/uv" "${options[@]}" -c runtime.lock -c dev.lock tune.in -o tune.lock
"$project_root/.venv/bin/uv" "${options[@]}" --no-deps upstream.in -o upstream.lock
# The image's: for machines of every kind, with the hashes of all of them.
"$project_root/.venv/bin/uv" "${options[@]}" --universal --no-deps image.in -o ../requirements.txt
# Not resolved against the others, which they contradict; see trackers.in.
"$project_root/.venv/bin/uv" "${options[@]}" trackers.in -o trackers.lock
# As that one; see profiles.in.
"$project_root/.venv/bin/uv" "${options[@]}" profiles.in -o profiles.lock
# As those: another torch_npu, with a torch for the CPU alone. Where the index has none, UV_FIND_LINKS says who does.
"$project_root/.venv/bin/uv" "${options[@]}" torch_npu_2.13.in -o torch_npu_2.13.lock
