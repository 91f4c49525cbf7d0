"""Micro batches of a number of tokens instead of a number of sequences."""
