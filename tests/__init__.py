"""The test suite; a real package, because some installed packages bring a top-level `tests` of their own."""
