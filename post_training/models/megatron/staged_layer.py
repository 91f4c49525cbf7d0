"""Decoder layers of pipeline stages that may have different numbers of them."""

from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer


class StagedLayer(TransformerLayer):
    """A decoder layer that knows its index when pipeline stages have different numbers of layers."""

    def _get_layer_offset(self) -> int:
        return self.config.first_layer_of_stage(parallel_state.get_pipeline_model_parallel_rank())
