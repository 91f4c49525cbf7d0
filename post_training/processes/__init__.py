"""Run a command and end everything that it started, and find the descendants of a process."""
