"""Measures how often rollout and training send the same token to different experts."""
