"""Placements of a fixed number of ranks, drawn with a seeded generator so that every rank draws the same ones."""

import random

from post_training.layouts.layout import RolloutPlacement, TrainPlacement


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def draw_train_placement(
    draw: random.Random, world: int, layers: int, vocab_padded: tuple[int | None, ...], tensor_sizes: list[int]
) -> TrainPlacement:
    """Draw sizes whose product is `world`, stages with any number of layers, even 0, and possibly virtual stages."""
    tp = draw.choice([size for size in tensor_sizes if world % size == 0])
    pp = draw.choice([size for size in divisors(world // tp) if size <= 4])
    virtual = draw.choice([1, 1, 2])
    edges = [0, *sorted(draw.choices(range(layers + 1), k=pp * virtual - 1)), layers]
    dp = world // tp // pp
    return TrainPlacement(
        tp=tp,
        pp=pp,
        ep=draw.choice(divisors(dp)),
        dp=dp,
        num_layer_list=tuple(stop - start for start, stop in zip(edges, edges[1:], strict=False)),
        moe_tp_extend_ep=draw.random() < 0.6,
        virtual_stages=virtual,
        vocab_padded=draw.choice(vocab_padded),
    )


def rollout_placements(world: int) -> list[RolloutPlacement]:
    """Return every combination of instances, tensor and expert parallelism, alternating the shared expert."""
    sizes = [
        (tp, world // instances // tp, ep, instances)
        for instances in divisors(world)
        for tp in divisors(world // instances)
        for ep in sorted({1, world // instances})
    ]
    return [
        RolloutPlacement(tp=tp, dp=dp, ep=ep, instances=instances, shared_expert_replicated=bool(number % 2))
        for number, (tp, dp, ep, instances) in enumerate(sizes)
    ]
