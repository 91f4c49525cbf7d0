"""Batches that stay on the devices: the driver sends sample references, and workers exchange the tokens themselves."""
