"""Layout of a layer's routed experts in Megatron's GroupedMLP and in vLLM-Ascend's FusedMoE.

Example of training with two ranks of TP x EP and four experts of hidden size 8 and width 3: rank 1 has experts 2 and 3,
`weight1` of shape (8, 12) is read as (2, 8, 6), and columns 0 to 2 of its second matrix are the transposed gate_proj of
expert 3.
"""

from dataclasses import dataclass
from functools import lru_cache

from post_training.layouts.layout import (
    LocalView,
    RolloutPlacement,
    Shard,
    Slice,
    TrainPlacement,
    share,
)


@dataclass(frozen=True)
class Experts:
    """Number and sizes of the routed experts of one layer."""

    count: int
    hidden: int
    width: int


def megatron_experts(experts: Experts, placement: TrainPlacement, rank: int, layer: int, local: str) -> list[Shard]:
    """Return the experts of a GroupedMLP: weight1 is (expert, hidden, gate|up), weight2 is (expert, width, hidden)."""
    width, hidden = experts.width, experts.hidden
    if placement.moe_tp_extend_ep:
        group, index, interval = placement.tp * placement.ep, placement.tp_ep_rank(rank), (0, width)
    else:
        group, index = placement.ep, placement.ep_rank(rank)
        interval = share(width, placement.tp, placement.tp_rank(rank), "expert width over tensor parallel ranks")
    first, last = share(experts.count, group, index, "experts over the expert group")
    views = _grouped_expert_views(last - first, hidden, interval[1] - interval[0])
    return _expert_shards(layer, first, views, (interval, (0, hidden)), (f"{local}weight1", f"{local}weight2"))


ExpertViews = list[tuple[LocalView, LocalView, LocalView]]
"""Views of gate, up and down projection of every local expert in the two local weights."""


@lru_cache(maxsize=64)
def _grouped_expert_views(count: int, hidden: int, rows: int) -> ExpertViews:
    first, second = (count, hidden, 2 * rows), (count, rows, hidden)
    return [
        (
            LocalView(first, (slot, (0, hidden), (0, rows)), transposed=True),
            LocalView(first, (slot, (0, hidden), (rows, 2 * rows)), transposed=True),
            LocalView(second, (slot,), transposed=True),
        )
        for slot in range(count)
    ]


def _expert_shards(layer: int, first: int, views: ExpertViews, bounds: Slice, local: tuple[str, str]) -> list[Shard]:
    """Return the shards of consecutive experts; `bounds` is the region of gate and up, and transposed that of down."""
    down_bounds = (bounds[1], bounds[0])
    shards = []
    for expert, (gate, up, down) in enumerate(views, first):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}."
        shards.append(Shard(f"{prefix}gate_proj.weight", bounds, local[0], gate))
        shards.append(Shard(f"{prefix}up_proj.weight", bounds, local[0], up))
        shards.append(Shard(f"{prefix}down_proj.weight", down_bounds, local[1], down))
    return shards


def rollout_experts(experts: Experts, placement: RolloutPlacement, rank: int, layer: int) -> list[Shard]:
    """Return experts of a FusedMoE: w13_weight is (expert, gate|up, hidden), w2_weight is (expert, hidden, width)."""
    width, interval = experts.width, (0, experts.width)
    if placement.ep == 1:
        parts = placement.tp * placement.dp
        interval = share(width, parts, placement.tp_dp_rank(rank), "expert width over the ranks of one instance")
    return _rollout_layer_experts(experts.hidden, layer, placement.experts(rank, experts.count), interval)


@lru_cache(maxsize=1 << 14)
def _rollout_layer_experts(hidden: int, layer: int, experts: tuple[int, int], interval: tuple[int, int]) -> list[Shard]:
    """Cached, because instances have the same shards; sharing them halves the planner's reading."""
    local = f"model.layers.{layer}.mlp.experts."
    views = _rollout_expert_views(experts[1] - experts[0], interval[1] - interval[0])
    return _expert_shards(
        layer, experts[0], views, (interval, (0, hidden)), (f"{local}w13_weight", f"{local}w2_weight")
    )


@lru_cache(maxsize=64)
def _rollout_expert_views(count: int, rows: int) -> ExpertViews:
    return [
        (LocalView(index=(slot, (0, rows))), LocalView(index=(slot, (rows, 2 * rows))), LocalView(index=(slot,)))
        for slot in range(count)
    ]
