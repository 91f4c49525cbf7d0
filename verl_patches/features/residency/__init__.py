"""The offload manager: which tensors are on the device in each phase of a training step, and how they move."""
