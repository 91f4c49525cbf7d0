"""Model families whose routers can be replayed on FSDP2, for processes that load no torch."""

FSDP2_FAMILIES = ("qwen3_moe", "deepseek_v3")
"""`model_type` of the families whose transformers 5 routers `fsdp2_engine` supports."""
