"""Every request of a rollout draws random numbers of its own."""
