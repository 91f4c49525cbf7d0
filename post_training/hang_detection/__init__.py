"""Seeing a hang: processes send heartbeats through Ray, and the driver names the one that stopped."""
