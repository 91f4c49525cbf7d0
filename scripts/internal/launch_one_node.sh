#!/usr/bin/env bash
# Runs a job on the dies of this machine, or on emulated ones: launch_one_node.sh CONFIGURATION DIES [OPTIONS]. See --help.
set -euo pipefail

project_root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)
readonly project_root
for part in terminal arguments masking inherited settings environment stack one_node; do
    # shellcheck source=/dev/null # each is checked by itself
    source "$project_root/scripts/lib/$part.sh"
done

usage() {
    cat <<'USAGE'
Usage: bash scripts/train_qwen2_5_{0_5b_gsm8k,1_5b_math_one_card}.sh
           [OPTIONS] [-- KEY=VALUE...]
       bash scripts/train_qwen2_5_vl_{3b_geo3k_one_card,7b_geo3k}.sh
           [OPTIONS] [-- KEY=VALUE...]
       bash scripts/train_qwen3_{0_6b_gsm8k_one_card,30b_a3b_gsm8k_one_node}.sh
           [OPTIONS] [-- KEY=VALUE...]   stack 2026: docs/first-hour-2026.md

Trains on the NPUs of this machine; with --emulate on emulated ones, with a
tiny model of the same family. Stops everything that it starts.

  --emulate         no NPU, no download: set up the environment, make model and
                    data, train, and write a report
  --chip NAME       with --emulate: the chip to emulate, a2 or a3 (default: a3;
                    not for Qwen3, which takes a2)
  --model DIR       folder of the published model (not with --emulate)
  --data FILE       problems with answers: GSM8K's .jsonl, MATH's or
                    DeepScaleR's .json, or .parquet; for Qwen2.5-VL,
                    Geometry3K's .parquet (default with --emulate: the
                    arithmetic in data/, or drawn images)
  --test-data FILE  problems to validate on (not with --emulate; default: a
                    tenth of --data)
  --steps N         training steps (default: the configuration's)
  --output DIR      folder to write (default: outputs/CONFIGURATION/TIME)
  --resume DIR      resume the step in DIR; or auto: the newest complete step in
                    --output, step 1 if there is none; or never; with --emulate,
                    the run's own options apply
  --settings FILE   the vendor's scripts and variables of this machine (not
                    with --emulate; default: scripts/env/one_node.env, and for
                    Qwen3 one_node_2026.env)
  --check           check data, configuration and memory of a die, without NPUs
  --dry-run         print the commands, and start nothing
  --help            print this
  -- KEY=VALUE...   Hydra overrides for the training

Example:
  bash scripts/train_qwen2_5_0_5b_gsm8k.sh --emulate --steps 5 \
      -- actor_rollout_ref.actor.optim.lr=1e-6

Exit codes: 0 done; 1 the training failed; 2 arguments, machine or
configuration rejected; 130 Ctrl-C; 143 terminated.
USAGE
}

# shellcheck disable=SC2034 # one_node.sh reads what main sets
main() {
    # A launcher names configuration and dies; whoever starts this file by hand can ask what it wants.
    [[ ${1:-} != --help ]] || { usage; return; }
    local configuration=$1 dies=$2 name
    shift 2
    declare -g emulate=false dry_run=false check=false model='' data='' test_data='' chip='' steps='' output='' settings='' going_on=''
    declare -ga overrides=() resume=()
    while (($#)); do
        case $1 in
            --help) usage; return ;;
            --emulate) emulate=true; shift ;;
            --dry-run) dry_run=true; shift ;;
            --check) check=true; shift ;;
            --model | --data | --test-data | --chip | --steps | --output | --settings)
                argument_require_value "$1" $#
                case $1 in
                    --data | --test-data) argument_require_file "$1" "$2" 'a .json, .jsonl or .parquet file' ;;
                    --chip) argument_require_chip "$2" ;;
                    --settings) argument_require_file "$1" "$2" 'a file of NAME=value lines' ;;
                    --steps) argument_require_number "$1" "$2" 1 ;;
                esac
                name=${1#--}
                printf -v "${name//-/_}" '%s' "$2"
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
    inherited_drop "$project_root"
    one_node_resume
    if $emulate; then
        ! $check || fail "--check is invalid with --emulate: a rehearsal checks the job itself. Remove one of them."
        one_node_emulate "$project_root" "$configuration"
    else
        one_node_train "$project_root" "$configuration" "$dies" "$(stack_of "$project_root" "$configuration")"
    fi
}

main "$@"
