"""Checkpoints as files: HuggingFace safetensors (BF16 or FP8) and Megatron shards, read, converted and compared.

All conversions use the sharding specs of `post_training/layouts`. No checkpoint is ever held whole: tensors are read
with `pread` into small buffers and written as they are read.
"""
