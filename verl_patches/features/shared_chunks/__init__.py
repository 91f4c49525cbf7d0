"""Storage of each part of a batch once, for all workers that take it."""
