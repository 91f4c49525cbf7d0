"""Routing replay on the stack 2026."""
