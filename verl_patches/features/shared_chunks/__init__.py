"""Handing a part of a batch to all workers that share it, once."""
