"""The test suite. It is a regular package because some installed packages ship a top-level `tests` of their own."""
