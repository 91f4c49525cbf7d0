#!/usr/bin/env bash
# Starts a container of the cluster's image with the NPUs of this machine. See --help.
set -euo pipefail

project_root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
readonly project_root
# shellcheck source=scripts/lib/terminal.sh
source "$project_root/scripts/lib/terminal.sh"
# shellcheck source=scripts/lib/arguments.sh
source "$project_root/scripts/lib/arguments.sh"

# What the driver keeps on the host; each is passed in read-only where it exists.
readonly DRIVER_PATHS=(
    /usr/local/dcmi /usr/local/bin/npu-smi /usr/local/sbin/npu-smi /usr/local/Ascend/driver /etc/ascend_install.info
    /etc/hccn.conf /usr/bin/hccn_tool /etc/localtime
)

usage() {
    cat <<'USAGE'
Usage: bash scripts/run_container.sh --image IMAGE --name NAME [OPTIONS] [-- COMMAND...]

Starts a container in the background, with the host's network, because HCCL and Ray use it. It gets the NPUs through
Docker's Ascend runtime where that is installed, and as devices otherwise. It is not privileged and sees no folder of the
host except the driver's and those that --mount names.

  --dies N          NPUs to pass in, from 0 on (default: 16)
  --mount PATH      a folder of the host, under the same path; again for more; PATH:ro read-only
  --shm-size SIZE   shared memory, in which Ray keeps objects (default: 256g)
  --root PATH       where to look for devices and driver instead of / (for trying it out)
  --dry-run         print the command and start nothing
  --help            print this
USAGE
}

# Adds the NPUs to the command: by the Ascend runtime, or device by device.
add_npus() {
    local dies=$1 device runtimes last=$(($1 - 1))
    runtimes=$(docker info --format '{{json .Runtimes}}' 2>/dev/null) || runtimes=''
    if [[ $runtimes == *'"ascend"'* ]]; then
        command+=(--runtime ascend --env "ASCEND_VISIBLE_DEVICES=0-$last")
        return
    fi
    for device in $(seq -f '/dev/davinci%g' 0 "$last") /dev/davinci_manager /dev/devmm_svm /dev/hisi_hdc; do
        [[ -e $device_root$device ]] || fail "There is no $device: is the NPU driver installed, and has this machine $dies dies?"
        command+=(--device "$device")
    done
}

# Adds the driver's files and the user's folders to the command.
add_mounts() {
    local path mode
    for path in "${DRIVER_PATHS[@]}"; do
        [[ ! -e $device_root$path ]] || command+=(--volume "$path:$path:ro")
    done
    for path in "${mounts[@]}"; do
        mode=${path##*:}
        [[ $mode == ro ]] || mode=rw
        path=${path%:ro}
        [[ $path == /* && -d $path ]] || fail "--mount: $path is no folder of this machine, given from / on."
        command+=(--volume "$path:$path:$mode")
    done
}

main() {
    local image="" name="" dies=16 shared=256g dry_run=false mounts=() inside=(/bin/bash)
    local device_root=""
    while (($#)); do
        case $1 in
            --help) usage; return ;;
            --dry-run) dry_run=true; shift ;;
            --) shift; inside=("$@"); break ;;
            --image | --name | --dies | --mount | --shm-size | --root)
                argument_require_value "$1" $#
                case $1 in
                    --image) image=$2 ;;
                    --name) name=$2 ;;
                    --dies) argument_require_number "$1" "$2" 1; dies=$2 ;;
                    --mount) mounts+=("$2") ;;
                    --shm-size) shared=$2 ;;
                    --root) device_root=$2 ;;
                esac
                shift 2
                ;;
            *) fail "Unknown argument \"$1\": see --help." ;;
        esac
    done
    [[ -n $image && -n $name ]] || fail "--image and --name are needed: see --help."
    command -v docker >/dev/null || fail "docker was not found; install it, or start the image with what you have."
    local command=(docker run --detach --interactive --tty --init --name "$name" --network host --shm-size "$shared")
    # HCCL pins memory and opens a connection to every other die.
    command+=(--ulimit memlock=-1 --ulimit nofile=1048576)
    add_npus "$dies"
    add_mounts
    command+=("$image" "${inside[@]}")
    if $dry_run; then
        printf '%q ' "${command[@]}"
        printf '\n'
        return
    fi
    "${command[@]}"
    say "enter it with: docker exec -it $name bash"
}

main "$@"
