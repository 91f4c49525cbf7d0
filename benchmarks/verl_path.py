"""verl 0.4.0's own way to move weights: its generator of whole tensors, its name converter, vLLM's `load_weights`.

verl's code runs as it is installed. It knows DeepSeek-V3 under the parameter names of later megatron-core releases, so
the training weights are given to it as a module with those names, each expert cut over tensor parallel ranks.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from post_training.layouts.layout import TrainPlacement
from post_training.models.deepseek_v3 import DeepseekV3Shape
from tests.post_training.layouts.reference import State, chunk

LAYER_NAMES = {"qkv_layer_name": "self_attention.linear_qkv.", "gate_proj_layer_name": "linear_fc1.weight"}

WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
}
CUT = {
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight", 0),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight", 0),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
}


class TrainingModule(nn.Module):
    """The weights of one rank under the names that verl's converter knows; it computes nothing."""

    def __init__(self, full: State, shape: DeepseekV3Shape, placement: TrainPlacement, rank: int) -> None:
        super().__init__()
        self._parts, self._part, self._stage = placement.tp, placement.tp_rank(rank), placement.pp_rank(rank)
        if self._stage == 0:
            self._add("embedding.word_embeddings.weight", full["model.embed_tokens.weight"], 0)
        for slot in placement.layers(rank):
            self._add_layer(full, shape, placement, rank, slot.layer, f"decoder.layers.{slot.position}.")
        if self._stage == placement.pp - 1:
            self._add("decoder.final_layernorm.weight", full["model.norm.weight"])
            self._add("output_layer.weight", full["lm_head.weight"], 0)

    def _add_layer(
        self, full: State, shape: DeepseekV3Shape, placement: TrainPlacement, rank: int, layer: int, local: str
    ) -> None:
        prefix = f"model.layers.{layer}."
        for name, canonical in WHOLE.items():
            self._add(local + name, full[prefix + canonical])
        for name, (canonical, dimension) in CUT.items():
            self._add(local + name, full[prefix + canonical], dimension)
        if shape.is_dense(layer):
            self._add_gated(full, f"{prefix}mlp.", f"{local}mlp.linear_fc{{}}.weight")
            return
        self._add(f"{local}mlp.router.weight", full[f"{prefix}mlp.gate.weight"])
        router = self.get_submodule(f"{local}mlp.router")
        router.register_buffer("expert_bias", full[f"{prefix}mlp.gate.e_score_correction_bias"].float().npu())
        self._add_gated(full, f"{prefix}mlp.shared_experts.", f"{local}mlp.shared_experts.linear_fc{{}}.weight")
        count = shape.experts // placement.ep
        for slot in range(count):
            expert = f"{prefix}mlp.experts.{placement.ep_rank(rank) * count + slot}."
            self._add_gated(full, expert, f"{local}mlp.experts.linear_fc{{}}.weight{slot}")

    def _add_gated(self, full: State, prefix: str, local: str) -> None:
        gate_up = [chunk(full[f"{prefix}{name}_proj.weight"], self._parts, self._part) for name in ("gate", "up")]
        self._register(local.format(1), torch.cat(gate_up), 0)
        self._add(local.format(2), full[f"{prefix}down_proj.weight"], 1)

    def _add(self, name: str, values: torch.Tensor, dimension: int | None = None) -> None:
        held = values if dimension is None else chunk(values, self._parts, self._part, dimension)
        self._register(name, held, dimension)

    def _register(self, name: str, values: torch.Tensor, dimension: int | None) -> None:
        parameter = nn.Parameter(values.contiguous().npu(), requires_grad=False)
        parameter.tensor_model_parallel = dimension is not None
        parameter.partition_dim = -1 if dimension is None else dimension
        *path, last = name.split(".")
        owner: nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]
        owner.register_parameter(last, parameter)


class VerlPath:
    """The weight transfer of verl's sharding manager at the start of a rollout."""

    def __init__(self, module: TrainingModule, hf_config: Any, placement: TrainPlacement, model: nn.Module) -> None:
        from verl.models.mcore.weight_converter import McoreToHFWeightConverterDpskv3

        self._module, self._model = module, model
        first = [sum(placement.num_layer_list[:stage]) for stage in range(placement.pp)]
        self._transformer_config = SimpleNamespace(first_layer_of_stage=lambda stage: first[stage])
        self._converter = McoreToHFWeightConverterDpskv3(
            hf_config, SimpleNamespace(num_moe_experts=hf_config.n_routed_experts)
        )
        # Another architecture's name keeps the overlay from answering in verl's place.
        self._model_config = SimpleNamespace(architectures=["verl's own path"], tie_word_embeddings=False)

    def run(self) -> None:
        """Gather every tensor on every rank and load it."""
        from verl.utils.megatron_utils import per_tensor_generator
        from verl.utils.vllm_utils import patch_vllm_moe_model_weight_loader

        tensors = per_tensor_generator(
            [self._module], self._model_config, self._converter, self._transformer_config, LAYER_NAMES
        )
        patch_vllm_moe_model_weight_loader(self._model)
        self._model.load_weights(tensors)
