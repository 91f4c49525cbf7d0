"""Maps the layouts, which are those of vLLM-Ascend 0.9, to vLLM-Ascend 0.23's live weights.

Version 0.23 differs in four things. MLA's first projections are one weight, and so are the first two of an MLP in
Qwen2.5-VL's vision tower. The experts of a layer are kept transposed, as `w13_weight` (experts, hidden, gate|up) and
`w2_weight` (experts, width, hidden); the layouts have them in the order of the files. And `wake_up` replaces those
parameters by views of the same memory in the order of the files, which kernels cannot take: upstream makes new
transposed copies of them after each update (vllm-ascend's issue 11548; its main has pull request 13012).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from post_training.layouts.layout import LocalView, Shard
from post_training.layouts.model_tensors import weight_tensors

_EXPERTS = (".experts.w13_weight", ".experts.w2_weight")
# Weights that vLLM 0.23 fuses, with the layouts' names of their parts in the order of their rows.
_FUSED = {
    "fused_qkv_a_proj.weight": ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
    "gate_up_proj.bias": ("gate_proj.bias", "up_proj.bias"),
}
_PLACES = {part: (fused, place) for fused, parts in _FUSED.items() for place, part in enumerate(parts)}


def served_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live weights by name, experts as views in the order of the files."""
    return {
        name: tensor.data.transpose(1, 2) if _kept_transposed(name, tensor) else tensor
        for name, tensor in weight_tensors(model).items()
    }


def restore_expert_order(model: nn.Module) -> None:
    """Restore the order in which kernels take experts, after `wake_up` left them as views; copies no byte."""
    for name, parameter in list(model.named_parameters()):
        if name.endswith(_EXPERTS) and not _kept_transposed(name, parameter):
            path, _, attribute = name.rpartition(".")
            kept = nn.Parameter(parameter.data.transpose(1, 2), requires_grad=False)
            setattr(model.get_submodule(path), attribute, kept)


def _kept_transposed(name: str, tensor: torch.Tensor) -> bool:
    """Tell by the order in memory: square experts look alike (docs/upstream/verl-square-expert-weights.md)."""
    return name.endswith(_EXPERTS) and tensor.is_contiguous()


def fitted(shards: Iterable[Shard], weights: Mapping[str, object]) -> list[Shard]:
    """Return the shards under this model's names and views: two projections may be rows of one weight."""
    placed = []
    first_rows: dict[str, int] = {}
    for shard in shards:
        module, _, kind = shard.local.rpartition(".")
        prefix, _, projection = module.rpartition(".")
        fused, place = _PLACES.get(f"{projection}.{kind}", ("", 0))
        local = f"{prefix}.{fused}"
        if not fused or local not in weights:
            placed.append(shard)
            continue
        # The layouts, too, list the projection of the first rows first.
        rows = shard.extents[0]
        first = first_rows[local] if place else 0
        first_rows.setdefault(local, rows)
        placed.append(replace(shard, local=local, view=LocalView(index=((first, first + rows),))))
    return placed
