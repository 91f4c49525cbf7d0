"""The rehearsal's own model: a tiny DeepSeek-V3, its tokenizer, its arithmetic task and its warm start."""
