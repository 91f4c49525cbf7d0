"""Running training and rollout in one floating-point type."""
