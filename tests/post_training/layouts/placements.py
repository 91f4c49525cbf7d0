"""Hypothesis strategies for pairs of layouts."""

from hypothesis import strategies as st

from post_training.layouts.layout import RolloutPlacement, TrainPlacement

LAYERS = 3


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def layer_lists(draw: st.DrawFn, parts: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.lists(st.integers(0, LAYERS), min_size=parts - 1, max_size=parts - 1)))
    edges = [0, *cuts, LAYERS]
    return tuple(stop - start for start, stop in zip(edges, edges[1:], strict=False))


@st.composite
def train_placements(draw: st.DrawFn, world: int) -> TrainPlacement:
    tp = draw(st.sampled_from(divisors(world)))
    pp = draw(st.sampled_from(divisors(world // tp)))
    dp = world // tp // pp
    virtual_stages = draw(st.sampled_from([1, 1, 2]))
    return TrainPlacement(
        tp=tp,
        pp=pp,
        ep=draw(st.sampled_from(divisors(dp))),
        dp=dp,
        num_layer_list=draw(layer_lists(pp * virtual_stages)),
        moe_tp_extend_ep=draw(st.booleans()),
        virtual_stages=virtual_stages,
        vocab_padded=draw(st.sampled_from([None, 120])) if 100 % tp == 0 else 120,
    )


@st.composite
def rollout_placements(draw: st.DrawFn, world: int) -> RolloutPlacement:
    instances = draw(st.sampled_from(divisors(world)))
    size = world // instances
    tp = draw(st.sampled_from(divisors(size)))
    return RolloutPlacement(
        tp=tp,
        dp=size // tp,
        ep=draw(st.sampled_from([1, size])),
        instances=instances,
        shared_expert_replicated=draw(st.booleans()),
        lm_head_tp=draw(st.sampled_from([None, size])),
        vocab_multiple=draw(st.sampled_from([24, 120])),
    )


@st.composite
def layout_pairs(draw: st.DrawFn, worlds: tuple[int, ...] = (1, 2, 3, 4, 6)) -> tuple[TrainPlacement, RolloutPlacement]:
    world = draw(st.sampled_from(worlds))
    return draw(train_placements(world)), draw(rollout_placements(world))
