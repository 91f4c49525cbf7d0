"""Truncated importance sampling: weights of tokens by their probability in training relative to the rollout."""
