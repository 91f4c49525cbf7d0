"""Models of megatron-core. These modules import Megatron: import them only in code that builds a model."""
