"""The output layer of a critic."""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Linear):
    """One value per token, in place of the output layer of megatron-core's ``GPTModel``.

    Every tensor-parallel rank has the whole layer. Under sequence parallelism a rank computes the values, and thus the
    gradients, of its own tokens only: the marks let Megatron sum the gradients over the ranks.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1)
        self._gathers = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = self._gathers

    def forward(self, input_: torch.Tensor, *output_layers: Any, **options: Any) -> tuple[torch.Tensor, None]:
        """[tokens, 1, hidden] to float32 [all tokens, 1, 1]; further arguments of ``GPTModel`` are ignored."""
        values = super().forward(input_).float()
        if self._gathers:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
