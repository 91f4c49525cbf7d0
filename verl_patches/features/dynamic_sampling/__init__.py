"""DAPO's dynamic sampling: training on prompts whose answers have different rewards."""
