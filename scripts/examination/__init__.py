"""Looks at a node and a cluster before a job does, and says what to repair."""
