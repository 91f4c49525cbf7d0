"""The job and the objectives of scripts/tune.py: whether settings can run, and the value that they reach."""
