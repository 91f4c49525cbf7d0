#!/usr/bin/env bash
# Runs a launcher of the 256-die jobs on the nodes that Slurm gives; docs/operations.md.
#
#   sbatch deploy/slurm.sh scripts/train_deepseekv3_256die_true_weight.sh --cluster FILE --resume auto [-- KEY=VALUE...]
#   sbatch --no-kill deploy/slurm.sh --elastic OUTPUT scripts/train_deepseekv3_256die_true_weight.sh --cluster FILE
#
#SBATCH --job-name=deepseek-v3-256die
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gres=npu:16
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=outputs/slurm-%j.log
set -euo pipefail

if (($# == 0)); then
    printf 'error: no launcher: sbatch deploy/slurm.sh scripts/train_deepseekv3_256die_true_weight.sh --cluster FILE\n' >&2
    exit 2
fi
elastic=''
if [[ $1 == --elastic ]]; then
    elastic=${2:-}
    if [[ -z $elastic ]] || (($# < 3)); then
        printf 'error: --elastic needs a folder that all nodes share, followed by a launcher\n' >&2
        exit 2
    fi
    shift 2
fi
launcher=$1
shift
# Slurm runs a copy of this file, in the folder from which it was submitted.
if [[ ! -f $launcher ]]; then
    printf 'error: %s is not a file in %s. Submit from the root of the repository\n' "$launcher" "$PWD" >&2
    exit 2
fi
# Taken apart here: what reads one line of a pipe ends scontrol with SIGPIPE, and with pipefail the job.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
readonly elastic launcher head=${hosts%%$'\n'*}
if [[ -n $elastic ]]; then
    # The supervisors of the other nodes outlive a lost one, and the head's decides how the job goes on.
    exec srun --no-kill --kill-on-bad-exit=0 python3 scripts/supervise.py --elastic --output "$elastic" -- \
        bash "$launcher" --master "$head" "$@"
fi
# SIGTERM, at the end of the job's time or from scancel, reaches the launchers, which end what they run. A node that
# fails ends the others.
exec srun --kill-on-bad-exit=1 bash "$launcher" --master "$head" "$@"
