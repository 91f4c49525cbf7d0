"""Tests of the stack 2026."""
