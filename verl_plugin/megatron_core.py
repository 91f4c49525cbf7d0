"""Megatron-core alone as the training engine on an NPU: mbridge's bridges with layers that need no TransformerEngine.

On a real NPU MindSpeed stands in for TransformerEngine. Package registries have megatron-core and mbridge, and no
MindSpeed: with this module verl's engine `megatron` runs on these two, with Megatron-core's own layers
(`get_gpt_decoder_block_spec` without TransformerEngine). mbridge's `register_model` is the extension point: the last
bridge of a model type counts.

    VERL_USE_EXTERNAL_MODULES=verl_plugin.megatron_core

These layers take only padded batches (actor_rollout_ref.model.use_remove_padding=false) and one context parallel rank.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
import torch_npu.contrib.transfer_to_npu  # noqa: F401  (Megatron-core asks for torch.cuda)
from mbridge.core import register_model
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import nn

import overlay
from verl_plugin.bridges import BridgeOfTransformers5, DeepseekV3OfTransformers5

# Name of an expert's parameter in Megatron-core's own experts; TransformerEngine's have the number at the end.
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<linear>linear_fc[12])\.weight$")
# Norms that TransformerEngine keeps in the linear layer behind them.
_LATENT_NORMS = {
    ".self_attention.q_layernorm.weight": ".self_attention.linear_q_up_proj.layer_norm_weight",
    ".self_attention.kv_layernorm.weight": ".self_attention.linear_kv_up_proj.layer_norm_weight",
}
_INPUT_NORM = {".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight"}
_DENSE_NORM = {".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight"}
# Options that need kernels of TransformerEngine, of apex or of Megatron's own CUDA extensions.
_WITHOUT_KERNELS = {
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
}

overlay.activate(stack="2026")  # the four patches of the feature megatron_core


class _SummedGradient(torch.autograd.Function):
    """Identity whose gradient is summed over tensor parallel ranks.

    Megatron-core's `copy_to_tensor_model_parallel_region` sums a copy of a gradient that is not contiguous, and drops
    the result.
    """

    @staticmethod
    def forward(_: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=parallel_state.get_tensor_model_parallel_group())
        return summed


class LatentAttention(DotProductAttention):
    """Megatron-core's own attention, for heads whose values are not as wide as their keys (MLA).

    All heads of all tensor parallel ranks share the end of a key, which Megatron-core's own linear layer computes on
    each rank out of its share of the rows. Its gradient is summed over these ranks here; Megatron-core 0.16 does not:
    docs/upstream/megatron-core-tensor-parallel-gradients.md.
    """

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:  # Megatron-core builds it once without the widths, and then with them
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(self, query: torch.Tensor, key: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        shared = self.config.qk_pos_emb_head_dim
        own, position = key.split((key.shape[-1] - shared, shared), dim=-1)
        key = torch.cat((own, _SummedGradient.apply(position)), dim=-1)
        return super().forward(query, key, *others, **options)


class SequenceParallelNorm:
    """torch's RMSNorm, for the ranks of a tensor parallel group that share a sequence too.

    Each rank normalises its part of the sequence, and Megatron-core sums the gradients of weights that are marked
    `sequence_parallel`. Its own `WrappedTorchNorm` rejects sequence parallelism, which mbridge sets with several tensor
    parallel ranks.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        norm = nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


class WithoutTransformerEngine(BridgeOfTransformers5):
    """Builds a bridge's model from Megatron-core's own layers, and gives their parameters the names that it maps."""

    _skips_experts = False

    def _build_base_config(self, **kwargs: Any) -> Any:
        return super()._build_base_config(**{**kwargs, **_WITHOUT_KERNELS})

    def load_weights(self, models: list[nn.Module], weights_path: str, memory_efficient: bool = False) -> None:
        """As upstream, with whole experts on tensor parallel ranks too.

        mbridge knows an expert by TransformerEngine's name of the parameter. Ours it would cut over the tensor parallel
        ranks, each of which has other experts if these are whole (`expert_tensor_parallel_size=1`).
        """
        self._skips_experts = self.mpu.tp_size > self.mpu.etp_size
        try:
            super().load_weights(models, weights_path, memory_efficient)
        finally:
            skipped, self._skips_experts = self._skips_experts, False
        for model in models if skipped else ():
            parameters = model.state_dict()
            for local, mapped in self._weight_name_mapping_mcore_local_to_global(model).items():
                if _EXPERT.search(local):
                    names = self._weight_name_mapping_mcore_to_hf(mapped)
                    weights = [self.safetensor_io.load_one_hf_weight(name) for name in names]
                    parameters[local].copy_(self._weight_to_mcore_format(local, weights))

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        spec = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, normalization=self.config.normalization, vp_stage=vp_stage
        )
        spec.layer_norm = SequenceParallelNorm
        for layer in spec.layer_specs:
            attention = layer.submodules.self_attention.submodules
            for part in (layer.submodules, attention):
                for name in [name for name, value in vars(part).items() if value is WrappedTorchNorm]:
                    setattr(part, name, SequenceParallelNorm)
            if isinstance(self.config, MLATransformerConfig):
                attention.core_attention = LatentAttention
        return spec

    def _weight_name_mapping_mcore_local_to_global(self, model: nn.Module, consider_ep: bool = True) -> dict[str, str]:
        """Map this rank's names to those of the whole model, in TransformerEngine's form, which mbridge knows."""
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
        first = 0
        if consider_ep and self.mpu.ep_size > 1:
            first = self.config.num_moe_experts // self.mpu.ep_size * self.mpu.ep_rank
        skipped = {local for local in names if self._skips_experts and _EXPERT.search(local)}
        return {local: self._renamed(name, first) for local, name in names.items() if local not in skipped}

    def _renamed(self, name: str, first_expert: int) -> str:
        found = _EXPERT.search(name)
        if found:
            expert = int(found["expert"]) + first_expert
            return f"{name[: found.start()]}.mlp.experts.{found['linear']}.weight{expert}"
        norms = _LATENT_NORMS if isinstance(self.config, MLATransformerConfig) else _INPUT_NORM
        if self.config.num_moe_experts is None:
            norms = norms | _DENSE_NORM
        for own, mapped in norms.items():
            if name.endswith(own):
                return name.removesuffix(own) + mapped
        return name


@register_model("qwen2")
class LocalQwen2Bridge(WithoutTransformerEngine, Qwen2Bridge):
    """Qwen2.5, with tied embeddings too."""


@register_model("qwen3")
class LocalQwen3Bridge(WithoutTransformerEngine, Qwen3Bridge):
    """Qwen3, dense."""


@register_model("qwen3_moe")
class LocalQwen3MoEBridge(WithoutTransformerEngine, Qwen3MoEBridge):
    """Qwen3 with experts."""


@register_model("deepseek_v3")
class LocalDeepseekV3Bridge(WithoutTransformerEngine, DeepseekV3OfTransformers5):
    """DeepSeek-V3."""
