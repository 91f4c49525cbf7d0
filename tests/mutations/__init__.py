"""Mutation testing: plant bugs in a copy of the tree and see which the tests kill; `python -m tests.mutations -h`."""
