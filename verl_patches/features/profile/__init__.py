"""Profiles of chosen ranks in chosen steps."""
