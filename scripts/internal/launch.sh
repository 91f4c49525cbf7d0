#!/usr/bin/env bash
# Runs one node's part of a training job over several nodes: launch.sh CONFIGURATION [OPTIONS]. See --help.
set -euo pipefail

project_root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)
readonly project_root
for part in terminal arguments masking inherited settings environment stack one_node cluster network processes ray_node training; do
    # shellcheck source=/dev/null # each is checked by itself
    source "$project_root/scripts/lib/$part.sh"
done

usage() {
    cat <<'USAGE'
Usage: bash scripts/train_deepseekv3_256die_{random_init,true_weight}.sh
           [OPTIONS] [-- KEY=VALUE...]
       bash scripts/train_{deepseek_v3_671b_256,qwen3_235b_a22b_128}_dies.sh
           [OPTIONS] [-- KEY=VALUE...]   stack 2026: docs/cluster-2026.md

Start it on every node of the cluster, in any order and with the same
arguments. The node whose address is MASTER_ADDR starts Ray, waits for the
others, trains, and stops Ray; the others lend it their dies. A start after a
crash first stops what the crashed job left behind.

  --cluster FILE    settings of the cluster
                    (default: scripts/env/a3_256_dies[_2026].env)
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
  --check           check configuration and memory, on any machine (stack 2026)
  --emulate         no cluster, no download: train a tiny model on emulated dies
                    (stack 2026); takes --steps N and --output DIR
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

# shellcheck disable=SC2034 # the files of the launcher read what main sets
main() {
    # A launcher names the configuration; whoever starts this file by hand can ask what it wants.
    [[ ${1:-} != --help ]] || { usage; return; }
    local configuration=$1 cluster='' action=run stack name
    declare -g master='' joined='' taken_nodes='' going_on='' dry_run=false
    # one_node_emulate reads all of these; this launcher has options for the first two.
    declare -g steps='' output='' model='' data='' test_data='' chip=''
    declare -ga overrides=() resume=()
    shift
    stack=$(stack_of "$project_root" "$configuration")
    while (($#)); do
        case $1 in
            --help) usage; return ;;
            --dry-run) dry_run=true; shift ;;
            --describe | --stop | --check | --emulate) action=${1#--}; shift ;;
            --cluster | --master | --join | --nodes | --steps | --output)
                argument_require_value "$1" $#
                [[ $1 != --steps ]] || argument_require_number "$1" "$2" 1
                case $1 in
                    --join) name=joined ;;
                    --nodes) name=taken_nodes ;;
                    *) name=${1#--} ;;
                esac
                printf -v "$name" '%s' "$2"
                shift 2
                ;;
            --resume)
                argument_require_value "$1" $#
                going_on=$2
                settings_resume "$2" "$(stack_step_file "$project_root" "$configuration")"
                shift 2
                ;;
            --)
                shift
                overrides=("$@")
                break
                ;;
            *) fail "Unknown argument \"$1\": see --help. Training settings go after --." ;;
        esac
    done
    cluster=${cluster:-$project_root/scripts/env/a3_256_dies$(stack_suffix "$stack").env}
    if [[ $action == check || $action == emulate ]]; then
        [[ $stack == 2026 ]] || fail "--$action is invalid: scripts/preflight.py checks this job and rehearses it scaled down. Remove the option."
    elif [[ -n $steps$output ]]; then
        fail "--steps and --output are invalid without --emulate: a job takes trainer.total_training_steps after --, and OUTPUT_DIR from its cluster's file. Remove them."
    fi
    inherited_drop "$project_root"
    case $action in
        emulate) one_node_emulate "$project_root" "$configuration" ;;
        check) training_check_only "$project_root" "$configuration" "$stack" "$cluster" ;;
        *) node_part "$configuration" "$stack" "$cluster" "$action" ;;
    esac
}

# Does, shows, describes or stops this node's part of the job.
node_part() {
    local configuration=$1 stack=$2 cluster=$3 action=$4
    cluster_read "$cluster"
    # --stop ends what an earlier start left, whatever this shell's environment is.
    # shellcheck disable=SC2154 # cluster_read sets cluster_exports
    [[ $action == stop ]] || inherited_check_visible "$DIES_PER_NODE" "${cluster_exports[@]}"
    network_find_node
    cluster_prepare
    ray_node_prepare
    training_prepare "$project_root" "$configuration" "$stack"
    case $action in
        describe) training_describe | masking_show "$project_root" ;;
        stop) process_stop_node ;;
        run)
            # shellcheck disable=SC2154 # main sets it
            if $dry_run; then
                training_show | masking_show "$project_root"
            else
                training_run
            fi
            ;;
    esac
}

main "$@"
