"""Measurements of a run: time and device memory by phase, collectives, exactness of the rollout's weights."""
