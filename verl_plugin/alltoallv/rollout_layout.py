"""vLLM-Ascend 0.23's live weights in the terms of the layouts, which are vLLM-Ascend 0.9's.

Three things differ there. The first projections of MLA are one weight. The experts of a layer are kept transposed, each
`w13_weight` (experts, hidden, gate|up) and `w2_weight` (experts, width, hidden); the layouts have them in the order of
the files. And `wake_up` replaces those parameters by views in that order, of the same memory, which kernels cannot
take: upstream makes new transposed copies of them after each update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from post_training.layouts.layout import LocalView, Shard
from post_training.layouts.model_tensors import weight_tensors

_EXPERTS = (".experts.w13_weight", ".experts.w2_weight")
_FUSED, _QUERY, _KEY = "fused_qkv_a_proj.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight"


def served_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The live weights by name, experts as views in the order of the files."""
    return {
        name: tensor.data.transpose(1, 2) if _kept_transposed(name, tensor) else tensor
        for name, tensor in weight_tensors(model).items()
    }


def restore_expert_order(model: nn.Module) -> None:
    """Give experts that `wake_up` left as views the order again in which kernels take them; no byte is copied."""
    for name, parameter in list(model.named_parameters()):
        if name.endswith(_EXPERTS) and not _kept_transposed(name, parameter):
            path, _, attribute = name.rpartition(".")
            kept = nn.Parameter(parameter.data.transpose(1, 2), requires_grad=False)
            setattr(model.get_submodule(path), attribute, kept)


def _kept_transposed(name: str, tensor: torch.Tensor) -> bool:
    """Shapes do not say it where experts are square: docs/upstream/verl-square-expert-weights.md."""
    return name.endswith(_EXPERTS) and tensor.is_contiguous()


def fitted(shards: Iterable[Shard], weights: Mapping[str, object]) -> list[Shard]:
    """The same shards where this model keeps them: the fused first projections of MLA."""
    placed = []
    query_rows: dict[str, int] = {}
    for shard in shards:
        prefix, part = _attention_part(shard.local)
        if part is None or f"{prefix}{_FUSED}" not in weights:
            placed.append(shard)
            continue
        # The query's rows come first, in the layouts and in the weight.
        rows = shard.extents[0]
        first = 0 if part == _QUERY else query_rows[prefix]
        query_rows.setdefault(prefix, rows)
        placed.append(replace(shard, local=f"{prefix}{_FUSED}", view=LocalView(index=((first, first + rows),))))
    return placed


def _attention_part(local: str) -> tuple[str, str | None]:
    for part in (_QUERY, _KEY):
        if local.endswith(f".{part}"):
            return local.removesuffix(part), part
    return local, None
