"""The rehearsal: plans, checks, prepares, runs and reports one GRPO run on emulated dies. Started by rehearse.sh."""
