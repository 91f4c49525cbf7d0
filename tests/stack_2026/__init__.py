"""Tests of the 2026 stack."""
