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
Usage: bash scripts/run_container.sh --image NAME --name NAME [OPTIONS]
                                     [-- COMMAND...]

Starts a container in the background, with the host's network for HCCL and Ray.
It gets the NPUs through Docker's Ascend runtime where that is installed, else
as devices. The container is not privileged, and sees only the driver's folders
and those of --mount.

  --image NAME      the image
  --name NAME       the container's name
  --dies N          number of NPUs to pass in, from 0 on (default: all of this
                    machine: 8 on an Atlas A2, 16 on an Atlas A3)
  --devices N,N     the NPUs to pass in; the container numbers them from 0
  --mount DIR       a folder of the host, at the same path; repeatable; DIR:ro
                    for read-only
  --shm-size SIZE   shared memory, for Ray's objects (default: 256g)
  --root DIR        where to look for devices and driver (default: /; for tests)
  --dry-run         print the command and start nothing
  --help            print this

Example:
  bash scripts/run_container.sh --image recipe:latest --name train \
      --mount /data/models:ro --dry-run
USAGE
}

# Prints the numbers of the NPUs to pass in, one a line: those of --devices, the first of --dies, or all there are.
list_npus() {
    local path number found=0
    if [[ -n $devices ]]; then
        tr , '\n' <<<"$devices"
        return
    fi
    if [[ -z $dies ]]; then
        for path in "$device_root"/dev/davinci*; do
            number=${path##*davinci}
            [[ ! $number =~ ^[0-9]+$ ]] || ((found += 1))
        done
        ((found > 0)) || fail "/dev/davinci0 does not exist. Is the NPU driver installed?"
        dies=$found
    fi
    seq 0 $((dies - 1))
}

# Adds the NPUs to the command: by the Ascend runtime, or device by device.
add_npus() {
    local device runtimes listed numbers
    listed=$(list_npus) || exit $?
    mapfile -t numbers <<<"$listed"
    runtimes=$(docker info --format '{{json .Runtimes}}' 2>/dev/null) || runtimes=''
    if [[ $runtimes == *'"ascend"'* ]]; then
        command+=(--runtime ascend --env "ASCEND_VISIBLE_DEVICES=${devices:-0-${numbers[-1]}}")
        return
    fi
    for device in "${numbers[@]/#//dev/davinci}" /dev/davinci_manager /dev/devmm_svm /dev/hisi_hdc; do
        [[ -e $device_root$device ]] || fail "$device does not exist. Is the NPU driver installed, and does npu-smi show that NPU?"
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
        [[ $path == /* && -d $path ]] || fail "--mount=$path is invalid. Set it to an absolute path of a folder on this machine."
        command+=(--volume "$path:$path:$mode")
    done
}

main() {
    local image="" name="" dies="" devices="" shared=256g dry_run=false mounts=() inside=(/bin/bash)
    local device_root=""
    while (($#)); do
        case $1 in
            --help) usage; return ;;
            --dry-run) dry_run=true; shift ;;
            --) shift; inside=("$@"); break ;;
            --image | --name | --dies | --devices | --mount | --shm-size | --root)
                argument_require_value "$1" $#
                case $1 in
                    --image) image=$2 ;;
                    --name) name=$2 ;;
                    --dies) argument_require_number "$1" "$2" 1; dies=$2 ;;
                    --devices)
                        [[ $2 =~ ^[0-9]+(,[0-9]+)*$ ]] || fail "--devices=$2 is invalid. Set it to numbers of NPUs, such as 3 or 0,1,6."
                        devices=$2
                        ;;
                    --mount) mounts+=("$2") ;;
                    --shm-size) shared=$2 ;;
                    --root) device_root=$2 ;;
                esac
                shift 2
                ;;
            *) fail "Unknown argument \"$1\": see --help." ;;
        esac
    done
    [[ -z $dies || -z $devices ]] || fail "--dies and --devices both choose NPUs. Remove one of them."
    [[ -n $image && -n $name ]] || fail "--image and --name are needed: see --help."
    command -v docker >/dev/null || fail "docker was not found. Install it, or start the image with another tool."
    local command=(docker run --detach --interactive --tty --init --name "$name" --network host --shm-size "$shared")
    # HCCL pins memory and opens a connection to every other die.
    command+=(--ulimit memlock=-1 --ulimit nofile=1048576)
    add_npus
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
