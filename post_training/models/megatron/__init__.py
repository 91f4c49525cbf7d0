"""Models of megatron-core. These modules import Megatron: import them where a model is built."""
