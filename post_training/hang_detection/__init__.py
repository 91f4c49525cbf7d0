"""Detect hangs: processes send heartbeats through Ray, and the driver names the one that stopped."""
