"""Answers near or at the greatest length: a penalty when they come near it, and no part in the loss when truncated."""
