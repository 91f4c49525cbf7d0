"""Patches of Megatron-core's optimizers."""
