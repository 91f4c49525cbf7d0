"""Skipping optimizer steps whose gradients hold inf or nan."""
