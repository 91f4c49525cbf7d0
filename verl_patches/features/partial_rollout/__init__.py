"""Partial rollouts: a rollout ends before its last answers, which continue in later steps from their tokens so far."""
