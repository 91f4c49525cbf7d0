"""Operators of torchair itself."""
