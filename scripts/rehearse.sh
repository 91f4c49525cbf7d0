#!/usr/bin/env bash
# Post-trains a tiny model with GRPO on emulated dies, from a bare checkout to a report. See --help.
set -euo pipefail

project_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly project_root
# shellcheck source=scripts/lib/terminal.sh
source "$project_root/scripts/lib/terminal.sh"
# shellcheck source=scripts/lib/arguments.sh
source "$project_root/scripts/lib/arguments.sh"
# shellcheck source=scripts/lib/environment.sh
source "$project_root/scripts/lib/environment.sh"
# The families that have a tiny model; written by scripts/internal/list_tiny_models.py.
readonly families_file=$project_root/scripts/lib/tiny_models.txt

usage() {
    cat <<USAGE
Usage: bash scripts/rehearse.sh [OPTIONS] [-- KEY=VALUE...]

Sets up .venv/, makes the checkpoint of a tiny model, post-trains it with GRPO
on emulated dies, and writes outputs/rehearsal/TIME/, with the link
outputs/rehearsal/latest. Stops everything that it starts.

  --stack NAME          2025 (default) or 2026: which versions to run, in .venv/
                        or .venv-2026/ (docs/stacks.md); with 2026 also:
    --job NAME          scale down this job of verl_plugin/config
    --backend NAME      megatron (default), fsdp2 or mindspeed (docs/stacks.md)
    --weights NAME      alltoallv (default), or naive, verl's own way
    --precision NAME    float32 (default) or bfloat16
    --tool NAME         calculator: the model calls it before it answers
    --rollout-dies N    N of the dies only generate while the others train
  --data FILE           problems to train on, like deepscaler.json (problem,
                        answer) or GSM8K's jsonl (question, answer)
                        (default: the arithmetic in data/)
  --model NAME          family of the tiny model (default: deepseek_v3):
                        $(<"$families_file")
  --steps N             training steps
  --seed N              of data order, sampling and training (default: 1)
  --dies N              emulated dies (default: 4; 2 for image models)
  --device-memory N     memory of each die in MiB (default: 1024)
  --chip NAME           a2 or a3: the chip to emulate, which rejects the other
                        chip's operators (default: a3)
  --stream-seed N       run streams in any order that events allow, drawn from
                        N: a missing wait shows (npu_emulator/README.md)
  --recipe NAME         grpo (default); dapo: clip-higher, dynamic sampling, an
                        overlong penalty; ppo: a critic, and advantages by GAE
  --output DIR          folder to write (default: outputs/rehearsal/TIME)
  --resume DIR          resume the run in DIR from its newest checkpoint, with
                        the run's own options; save with
                        -- trainer.save_freq=N
  --dry-run             print the plan and its commands, and start nothing
  --help                print this
  -- KEY=VALUE...       Hydra overrides for the training

Example:
  bash scripts/rehearse.sh --steps 5 -- actor_rollout_ref.actor.optim.lr=1e-4
USAGE
}

main() {
    local options=() overrides=() dry_run=false known choices of_2026="" stack=$ENVIRONMENT_DEFAULT_STACK
    while (($#)); do
        case $1 in
            --help) usage; return ;;
            --dry-run) dry_run=true; options+=("$1"); shift ;;
            --) shift; overrides=("$@"); break ;;
            --stack)
                argument_require_value "$1" $#
                environment_require_stack "$2"
                stack=$2
                shift 2
                ;;
            --backend | --weights | --precision | --tool | --rollout-dies | --job)
                argument_require_value "$1" $#
                choices=()
                case $1 in
                    --backend) choices=(megatron mindspeed fsdp2) ;;
                    --weights) choices=(alltoallv naive) ;;
                    --precision) choices=(float32 bfloat16) ;;
                    --tool) choices=(calculator) ;;
                    --rollout-dies) argument_require_number "$1" "$2" 1 ;;
                    --job) [[ -f $project_root/verl_plugin/config/$2.yaml ]] ||
                        fail "$1=$2 is invalid. Set it to the name of a file in verl_plugin/config, without .yaml." ;;
                esac
                [[ -z ${choices[*]} || (" ${choices[*]} " == *" $2 "* && $2 != *" "*) ]] ||
                    fail "$1=$2 is invalid. Set it to one of: ${choices[*]}."
                of_2026=$1
                options+=("$1" "$2")
                shift 2
                ;;
            --data | --output | --steps | --seed | --dies | --device-memory | --chip | --stream-seed | --recipe | --resume | --model)
                argument_require_value "$1" $#
                case $1 in
                    --data) argument_require_file "$1" "$2" ;;
                    --seed | --stream-seed) argument_require_number "$1" "$2" 0 ;;
                    --steps | --dies | --device-memory) argument_require_number "$1" "$2" 1 ;;
                    --model)
                        known=$(<"$families_file")
                        [[ $2 != *" "* && " $known " == *" $2 "* ]] || fail "--model=$2 is invalid. Set it to one of: $known."
                        ;;
                    --chip) argument_require_chip "$2" ;;
                    --recipe)
                        [[ $2 == grpo || $2 == dapo || $2 == ppo ]] ||
                            fail "--recipe=$2 is invalid. Set it to grpo, dapo or ppo."
                        ;;
                esac
                options+=("$1" "$2")
                shift 2
                ;;
            *) fail "Unknown argument \"$1\": see --help. Training settings go after --." ;;
        esac
    done

    [[ -z $of_2026 || $stack == 2026 ]] || fail "$of_2026 needs --stack 2026. Add it, or remove $of_2026."
    local python module=rehearsal
    # Each stack has a job of its own.
    [[ $stack == "$ENVIRONMENT_DEFAULT_STACK" ]] || module=rehearsal.stack_$stack
    python=$(environment_folder "$project_root" "$stack")/bin/python
    if ! $dry_run; then
        environment_ensure "$project_root" "$stack"
    elif [[ ! -x $python ]]; then
        python=$(environment_find_python)
    fi
    export PYTHONPATH=$project_root${PYTHONPATH:+:$PYTHONPATH}
    # The launcher measures prompts before it starts other processes; the tokenizer warns about its threads otherwise.
    export TOKENIZERS_PARALLELISM=false
    exec "$python" -m "$module" "${options[@]}" -- "${overrides[@]}"
}

main "$@"
