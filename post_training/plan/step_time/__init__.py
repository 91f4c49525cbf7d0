"""A step's seconds on paper: modelled from a job's sizes and a cluster's dies, nothing of it measured here."""
