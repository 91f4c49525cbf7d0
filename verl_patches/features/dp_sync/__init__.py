"""What the data-parallel rollout ranks agree on every decode step, over the device's collectives."""
