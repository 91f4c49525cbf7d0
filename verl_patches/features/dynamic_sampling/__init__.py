"""Training on the prompts whose answers differ: DAPO's dynamic sampling, in front of verl's own loop."""
