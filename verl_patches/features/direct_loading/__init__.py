"""Training and rollout ranks fill their weights from a HuggingFace folder, each with its own slices."""
