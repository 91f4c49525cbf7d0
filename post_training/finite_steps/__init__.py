"""Skip optimizer steps whose gradients, or their norm, are not finite."""
