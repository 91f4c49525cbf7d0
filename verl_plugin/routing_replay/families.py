"""Which families' routers FSDP2 replays, for processes that load no torch."""

FSDP2_FAMILIES = ("qwen3_moe", "deepseek_v3")
"""`model_type` of those whose routers, as transformers 5 has them, `fsdp2_engine` knows."""
