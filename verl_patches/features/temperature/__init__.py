"""Log-probs of training and rollout at the temperature with which the rollout samples."""
