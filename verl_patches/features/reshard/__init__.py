"""The switch of the reshard, and a process's generation counter of rollout weights."""
