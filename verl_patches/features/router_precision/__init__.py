"""Rollout and training choose experts from the same numbers."""
