"""One file per family of models, and the modules from which Megatron builds them."""
