"""Saying when a metric is not what it should be, at the step at which that is certain."""
