"""Print the plan digests of random placements, and Python's hash of a string, as JSON; run as a test's subprocess."""

import json
import random

from post_training.models.deepseek_v3 import megatron, vllm_ascend
from post_training.reshard.plan import make_plan
from tests.post_training.layouts.drawn_placements import draw_train_placement, rollout_placements
from tests.post_training.layouts.reference import SMALL

DRAWN = 24


def digest(seed: int) -> str:
    """Return the digest of one plan, made from newly built layouts."""
    draw = random.Random(seed)
    world = draw.choice([2, 4, 8])
    train = draw_train_placement(draw, world, SMALL.layers, (None, 120), [1, 2, 4])
    rollout = draw.choice(rollout_placements(world))
    ranks = range(world)
    layouts = [megatron(SMALL, train, rank) for rank in ranks], [vllm_ascend(SMALL, rollout, rank) for rank in ranks]
    return make_plan(*layouts, lambda name: 4).digest


if __name__ == "__main__":
    print(json.dumps({"hash": hash("rank"), "digests": [digest(seed) for seed in range(DRAWN)]}))
