"""Reshard training weights into rollout weights: the plan, its buckets, and the exchange on ranks that hold both."""
