"""The switch of the reshard, and the counter of rollout weights of a process."""
