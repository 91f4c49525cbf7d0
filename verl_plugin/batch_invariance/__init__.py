"""Log-probs of a rollout that do not depend on the batch: the mode, and a search for operators that break it."""
