"""Patches of torch for Megatron-core."""
