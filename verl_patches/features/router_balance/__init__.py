"""Forced router balance for benchmarks with random weights: every expert gets the same number of tokens."""
