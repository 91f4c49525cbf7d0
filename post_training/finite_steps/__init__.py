"""Optimizer steps that change nothing where gradients, or their norm, are not finite."""
