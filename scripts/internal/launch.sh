#!/usr/bin/env bash
# Runs one node's part of a training job over several nodes: launch.sh CONFIGURATION [OPTIONS]. See --help.
set -euo pipefail

project_root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)
readonly project_root
for part in terminal arguments masking inherited settings cluster network processes ray_node training; do
    # shellcheck source=/dev/null # each is checked by itself
    source "$project_root/scripts/lib/$part.sh"
done

usage() {
    cat <<'USAGE'
Usage: bash scripts/train_deepseekv3_256die_{random_init,true_weight}.sh
           [OPTIONS] [-- KEY=VALUE...]

Start it on every node of the cluster, in any order and with the same
arguments. The node whose address is MASTER_ADDR starts Ray, waits for the
others, trains, and stops Ray; the others lend it their dies. Stops everything
that it starts. A start after a crash first stops what the crashed job left
behind. A second start beside a running job is rejected.

  --cluster FILE    settings of the cluster
                    (default: scripts/env/a3_256_dies.env)
  --master HOST     name or address of the head, instead of the file's
                    MASTER_ADDR, where a scheduler chooses the nodes
  --join HOST:PORT  the head of a running Ray: compare its nodes' dies, versions
                    and checkouts on this node alone, and train on it; no Ray is
                    started or stopped
  --nodes N         train on N of the file's nodes, once N have joined;
                    supervise.py --elastic sets it after losing nodes
  --resume DIR      resume the step in DIR; or auto: the newest complete step in
                    OUTPUT_DIR/checkpoints, step 1 if there is none; or never
                    (default: the configuration decides)
  --dry-run         print this node's settings and commands, and start nothing
  --describe        print this node's role and command as JSON, start nothing
  --stop            stop the job on this node and what an earlier start left
  --help            print this
  -- KEY=VALUE...   Hydra overrides for the training; the head's apply

Example:
  bash scripts/train_deepseekv3_256die_true_weight.sh --cluster FILE \
      -- trainer.total_training_steps=2

Exit codes: 0 done; 1 the training failed; 2 settings, configuration or
arguments rejected; 3 Ray could not be started, or a job already runs; 4 the
head or other nodes did not come in time; 5 Ray on this node ended early; 130
Ctrl-C; 143 terminated.
USAGE
}

main() {
    # A launcher names the configuration; whoever starts this file by hand can ask what it wants.
    [[ ${1:-} != --help ]] || { usage; return; }
    local configuration=$1 cluster=$project_root/scripts/env/a3_256_dies.env action=run
    # shellcheck disable=SC2034 # the files of the launcher read them
    declare -g master='' joined='' taken_nodes=''
    # shellcheck disable=SC2034 # training.sh reads them
    declare -ga overrides=() resume=()
    shift
    while (($#)); do
        case $1 in
            --help) usage; return ;;
            --dry-run) action=show; shift ;;
            --describe) action=describe; shift ;;
            --stop) action=stop; shift ;;
            --cluster)
                argument_require_value "$1" $#
                cluster=$2
                shift 2
                ;;
            --master)
                argument_require_value "$1" $#
                # shellcheck disable=SC2034
                master=$2
                shift 2
                ;;
            --join)
                argument_require_value "$1" $#
                # shellcheck disable=SC2034
                joined=$2
                shift 2
                ;;
            --nodes)
                argument_require_value "$1" $#
                # shellcheck disable=SC2034
                taken_nodes=$2
                shift 2
                ;;
            --resume)
                argument_require_value "$1" $#
                settings_resume "$2"
                shift 2
                ;;
            --)
                shift
                # shellcheck disable=SC2034
                overrides=("$@")
                break
                ;;
            *) fail "Unknown argument \"$1\": see --help; training settings go after --." ;;
        esac
    done
    inherited_drop "$project_root"
    cluster_read "$cluster"
    # --stop ends what an earlier start left, whatever this shell's environment is.
    # shellcheck disable=SC2154 # cluster_read sets cluster_exports
    [[ $action == stop ]] || inherited_check_visible "$DIES_PER_NODE" "${cluster_exports[@]}"
    network_find_node
    cluster_prepare
    ray_node_prepare
    training_prepare "$project_root" "$configuration"
    case $action in
        show) training_show | masking_show "$project_root" ;;
        describe) training_describe | masking_show "$project_root" ;;
        stop) process_stop_node ;;
        run) training_run ;;
    esac
}

main "$@"
