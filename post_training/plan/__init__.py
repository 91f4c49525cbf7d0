"""Plans a job's memory, disk and time from its configuration before anything starts."""
