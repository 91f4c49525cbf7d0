"""Seeing a hang: processes give signs of life through Ray, and the driver names the one that stopped."""
