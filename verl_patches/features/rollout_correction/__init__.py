"""Weighing tokens by how likely training finds what the rollout sampled."""
