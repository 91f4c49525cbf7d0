"""Router scores in float32, so that rollout and training choose experts from the same numbers."""
