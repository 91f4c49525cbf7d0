"""Moving weights between layouts: HuggingFace files, Megatron training ranks, vLLM-Ascend rollout ranks."""
