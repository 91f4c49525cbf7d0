"""The place of every weight in files, in training and in the rollout."""
