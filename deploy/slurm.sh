#!/usr/bin/env bash
# Runs a launcher of the 256-die jobs on the nodes that Slurm gives; docs/operations.md.
#
#   sbatch deploy/slurm.sh scripts/train_deepseekv3_256die_true_weight.sh --cluster FILE --resume auto [-- KEY=VALUE...]
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
launcher=$1
shift
# Slurm runs a copy of this file, in the folder from which it was submitted.
if [[ ! -f $launcher ]]; then
    printf 'error: %s is no file below %s: submit from the folder of the repository\n' "$launcher" "$PWD" >&2
    exit 2
fi
# Taken apart here: what reads one line of a pipe ends scontrol with SIGPIPE, and with pipefail the job.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
readonly launcher head=${hosts%%$'\n'*}
# SIGTERM, at the end of the job's time or from scancel, reaches the launchers, which end what they run. A node that
# fails ends the others.
exec srun --kill-on-bad-exit=1 bash "$launcher" --master "$head" "$@"
