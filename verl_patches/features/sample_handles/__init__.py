"""Batches that stay on the devices: the driver sends handles of samples, and workers exchange the tokens themselves."""
