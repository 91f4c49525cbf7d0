"""Log-probs of a rollout that do not depend on the batch: which operators break that, and the mode that keeps it."""
