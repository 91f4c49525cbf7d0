"""Synchronisation of data-parallel rollout ranks over the device's collectives, once for several decode steps."""
