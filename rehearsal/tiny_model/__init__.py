"""The rehearsal's own models: tiny ones of each family, their tokenizer, their arithmetic task and their warm start."""
