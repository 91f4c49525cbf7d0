"""Megatron-core alone as the training engine."""
