"""Models the seconds of a step from a job's sizes and a cluster's dies; computed, not measured."""
