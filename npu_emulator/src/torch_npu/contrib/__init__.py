"""Optional additions to ``torch_npu``; nothing here is imported unless asked for."""
