"""Tests of routing replay on the stack 2026."""
