"""Runs the same tokens through rollout and training, and finds the first point of the model at which they diverge."""
