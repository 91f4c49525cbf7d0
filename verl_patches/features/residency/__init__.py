"""Which tensors are on the device in which phase of a training step, and moving them in and out."""
