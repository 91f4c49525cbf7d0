"""One file for each family of models, and what Megatron builds them from."""
