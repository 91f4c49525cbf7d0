"""The per-tensor algorithm that the recipe's authors published, written from its description alone.

Tensor after tensor: two object collectives announce it inside the pipeline group; a tensor that is cut over tensor
parallel ranks is gathered inside its stage; the stage broadcasts it to the others; experts are broadcast as they are
stored and then sent inside the tensor-and-expert group to the ranks that serve them. vLLM loads what arrives.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from post_training.layouts.layout import RolloutPlacement, TrainPlacement
from post_training.models.deepseek_v3 import DeepseekV3Shape

Named = Iterator[tuple[str, torch.Tensor]]

GLOBAL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.k_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_qb.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kvb.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
CUT = {"word_embeddings": 0, "output_layer": 0, "linear_qb": 0, "linear_kvb": 0, "linear_fc1": 0}
CUT |= {"linear_proj": 1, "linear_fc2": 1}


class PublishedPath:
    """One rank's part in the published algorithm, from training tensors under MindSpeed-LLM's names."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        shape: DeepseekV3Shape,
        train: TrainPlacement,
        rollout: RolloutPlacement,
        model: nn.Module,
    ) -> None:
        self._shape, self._train, self._rollout, self._model = shape, train, rollout, model
        self._rank, self._stage = dist.get_rank(), parallel_state.get_pipeline_model_parallel_rank()
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._expert_group = parallel_state.get_tensor_and_expert_parallel_group()
        first = sum(train.num_layer_list[: self._stage])
        self._tensors = {_with_global_layer(name, first): tensor for name, tensor in tensors.items()}

    def run(self) -> None:
        """Move every tensor and load it."""
        self._model.load_weights(self._moved())

    def _moved(self) -> Named:
        counts: list[int] = [0] * self._train.pp
        dist.all_gather_object(counts, len(self._tensors), group=self._stages)
        for stage, count in enumerate(counts):
            own = iter(self._tensors.items()) if stage == self._stage else iter(())
            for _ in range(count):
                yield from self._one(stage, *next(own, ("", None)))

    def _one(self, stage: int, name: str, tensor: torch.Tensor | None) -> Named:
        expert = "mlp.experts" in name
        if tensor is not None and not expert:
            tensor = self._gathered(name, tensor)
        name = self._announced(stage, name)
        shape, kind = self._announced(stage, None if tensor is None else (tuple(tensor.shape), tensor.dtype))
        if tensor is None:
            tensor = torch.empty(shape, dtype=kind, device="npu")
        dist.broadcast(tensor, dist.get_global_rank(self._stages, stage), group=self._stages)
        yield from self._served(name, tensor) if "mlp.experts" in name else self._named(name, tensor)

    def _announced(self, stage: int, value: Any) -> Any:
        told: list[Any] = [None] * self._train.pp
        dist.all_gather_object(told, value, group=self._stages)
        return told[stage]

    def _gathered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dimension = next((dim for part, dim in CUT.items() if f"{part}.weight" in name), None)
        if dimension is None or self._train.tp == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self._train.tp)]
        dist.all_gather(parts, tensor, group=self._tensor_group)
        if "linear_fc1" in name:
            halves = [part.chunk(2) for part in parts]
            return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        return torch.cat(parts, dimension)

    def _served(self, name: str, tensor: torch.Tensor) -> Named:
        """Send the experts of one layer from the group column that stores them to the ranks that serve them."""
        size = dist.get_world_size(self._expert_group)
        share = self._shape.experts // size
        column = dist.get_rank(self._expert_group)
        by_expert = tensor.view(share, -1)
        needs = [self._needed(dist.get_global_rank(self._expert_group, peer)) for peer in range(size)]
        mine = needs[column]
        sent = [max(min(last, (column + 1) * share) - max(first, column * share), 0) for first, last in needs]
        chosen = [
            by_expert[max(first - column * share, 0) :][:count] for (first, _), count in zip(needs, sent, strict=True)
        ]
        received = [max(min(mine[1], (peer + 1) * share) - max(mine[0], peer * share), 0) for peer in range(size)]
        arrived = by_expert.new_empty(sum(received), by_expert.shape[1])
        dist.all_to_all_single(arrived, torch.cat(chosen), received, sent, group=self._expert_group)
        prefix = f"model.layers.{name.split('.')[2]}.mlp.experts."
        hidden, width = self._shape.hidden, self._shape.moe_intermediate
        for expert, values in zip(range(*mine), arrived, strict=True):
            if name.endswith("weight1"):
                gate, up = values.view(hidden, 2 * width).t().contiguous().chunk(2)
                yield f"{prefix}{expert}.gate_proj.weight", gate
                yield f"{prefix}{expert}.up_proj.weight", up
            else:
                yield f"{prefix}{expert}.down_proj.weight", values.view(width, hidden).t().contiguous()

    def _named(self, name: str, tensor: torch.Tensor) -> Named:
        """Yield the HuggingFace tensors in one whole training tensor."""
        if name in GLOBAL:
            yield GLOBAL[name], tensor
            return
        _, _, layer, rest = name.split(".", 3)
        prefix = f"model.layers.{layer}."
        if rest == "self_attention.linear_qkv.weight":
            yield f"{prefix}self_attn.q_a_proj.weight", tensor[: self._shape.q_lora]
            yield f"{prefix}self_attn.kv_a_proj_with_mqa.weight", tensor[self._shape.q_lora :]
        elif rest.endswith("linear_fc1.weight"):
            gate, up = tensor.chunk(2)
            yield f"{prefix}{rest.removesuffix('linear_fc1.weight')}gate_proj.weight", gate
            yield f"{prefix}{rest.removesuffix('linear_fc1.weight')}up_proj.weight", up
        else:
            yield prefix + IN_LAYER[rest], tensor

    def _needed(self, rank: int) -> tuple[int, int]:
        return self._rollout.experts(rank, self._shape.experts)


def _with_global_layer(name: str, first: int) -> str:
    if not name.startswith("decoder.layers."):
        return name
    head, layers, position, rest = name.split(".", 3)
    return f"{head}.{layers}.{first + int(position)}.{rest}"
