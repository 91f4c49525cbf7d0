"""Training weights to rollout weights: the plan, its buckets, and the exchange on the ranks that hold both."""
