"""Random numbers of its own for every request of a rollout."""
