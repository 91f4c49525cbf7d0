"""Request migration: unfinished requests move between data-parallel ranks, so that all can run a smaller graph."""
