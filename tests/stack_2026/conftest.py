"""Tests of the stack 2026: left out where another one is installed."""

from importlib.metadata import version

collect_ignore_glob = [] if version("torch_npu").startswith("2.10.0") else ["*"]
