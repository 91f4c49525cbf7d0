"""Search settings of a job: the space, the search over it, and its results."""
