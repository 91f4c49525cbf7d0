"""Tests of benchmarks that need verl 0.9.1."""
