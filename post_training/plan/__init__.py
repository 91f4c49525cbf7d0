"""What a job will need, worked out from its configuration before anything starts."""
