"""Unfinished requests of a rollout change data-parallel ranks, so that all of them can run a smaller graph."""
