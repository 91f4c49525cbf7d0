"""Saving a training so that it goes on bit for bit, under the same layout or another one."""
