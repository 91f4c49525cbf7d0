"""RMSNorm through the NPU's fused operator."""

import torch
import torch_npu
from megatron.core.transformer.transformer_config import TransformerConfig


class NpuRMSNorm(torch.nn.Module):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis (Zhang and Sennrich, arXiv:1910.07467).

    Has the signature of megatron-core's norm specs. The weight is replicated over tensor-parallel ranks; under sequence
    parallelism its gradient is marked for the sum over them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        device = torch.device("npu", torch.npu.current_device())
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise ``hidden_states`` [..., hidden_size]; same shape and dtype."""
        return torch_npu.npu_rms_norm(hidden_states, self.weight, epsilon=self.eps)[0]
