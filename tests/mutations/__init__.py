"""Bugs planted into a copy of the tree, to see whether the tests notice them: `python -m tests.mutations --help`."""
