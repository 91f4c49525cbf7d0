#!/usr/bin/env bash
# Regenerates requirements/*.lock, requirements/2026/*.lock and requirements.txt from the .in files. See --help.
set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly project_root
# shellcheck source=scripts/lib/terminal.sh
source "$project_root/scripts/lib/terminal.sh"

usage() {
    cat <<'USAGE'
Usage: bash scripts/update_locks.sh [--upgrade]

Writes requirements/*.lock, requirements/2026/*.lock (of the stack 2026) and
requirements.txt from the .in files beside them, with hashes. Locked versions
stay; a new package of an .in file gets its newest fitting version. Queries
package registries.

  --upgrade    take the newest versions that the .in files allow
  --help, -h   print this, and write nothing

Example, after adding a line to requirements/runtime.in:
  bash scripts/update_locks.sh && bash scripts/test.sh
USAGE
}

options=(pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header)
case ${1:-} in
    --help | -h) usage; exit ;;
    --upgrade) options+=(--upgrade) ;;
    '') ;;
    *) fail "Unknown argument \"$1\": see --help." ;;
esac
(($# <= 1)) || fail "Unknown argument \"$2\": see --help."
[[ -x $project_root/.venv/bin/uv ]] || fail "$project_root/.venv/bin/uv was not found. Set up the environment with scripts/test.sh."
cd "$project_root/requirements"

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
# The stack 2026; its environment begins with bootstrap.lock too. What no library is linked with and nothing that runs here
# imports is left out: 800 MB of CUDA. The rest of torch's CUDA packages is needed to load torch.
unneeded=(nvidia-cusolver-cu12 nvidia-cuda-nvrtc-cu12 nvidia-nvtx-cu12 cuda-bindings cuda-pathfinder)
"$project_root/.venv/bin/uv" "${options[@]}" "${unneeded[@]/#/--no-emit-package=}" 2026/runtime.in -o 2026/runtime.lock
"$project_root/.venv/bin/uv" "${options[@]}" -c 2026/runtime.lock 2026/dev.in -o 2026/dev.lock
"$project_root/.venv/bin/uv" "${options[@]}" --no-deps 2026/upstream.in -o 2026/upstream.lock
# As those; the documentation has an environment of its own.
"$project_root/.venv/bin/uv" "${options[@]}" docs.in -o docs.lock
