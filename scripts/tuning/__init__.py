"""What scripts/tune.py asks of a job: whether settings can run, and what they bring."""
