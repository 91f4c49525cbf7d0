"""Micro batches sized by tokens instead of by sequences."""
