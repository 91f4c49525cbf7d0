"""What a run records about itself: time and device memory by phase, collectives, exactness of the rollout's weights."""
