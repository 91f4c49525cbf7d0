"""Searching settings of a job: the space, the search over it, and what it found."""
