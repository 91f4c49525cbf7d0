"""The feature megatron_core: on wherever `verl_plugin.megatron_core` is imported."""

from overlay import Feature

MEGATRON_CORE = Feature(
    name="megatron_core",
    purpose="Megatron-core trains on an NPU with its own layers, without TransformerEngine, apex and MindSpeed.",
)
