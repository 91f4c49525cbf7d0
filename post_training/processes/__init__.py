"""Run a command and end everything that it started, and find the processes below one."""
