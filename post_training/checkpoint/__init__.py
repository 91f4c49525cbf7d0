"""Checkpoints as files: HuggingFace safetensors (BF16 or FP8) and Megatron shards, read, converted and compared.

Everything goes through the layout tables of `post_training/layouts`, and nothing is ever held whole: tensors are read
with `pread` into small buffers and written as they come.
"""
