"""A job that continues in another layout takes the same optimizer step: gradients of one batch on four and two dies.

The batch is the same, and the model is a DeepSeek-V3 in float32. Errors are the norm of the difference over the norm
of the gradients, over all weights.
"""

from itertools import combinations

import pytest
import torch

from tests.forked import MEGATRON
from tests.post_training.models.megatron.deepseek_v3_checkpoint import build_model
from tests.ranks import run_ranks
from tests.verl_patches.features.exact_loss.test_gradients import NOTICEABLE, TOLERANCE
from tests.verl_patches.features.exact_loss.whole_pass import make_batch

pytestmark = pytest.mark.slow

PROGRAM = "tests.verl_patches.features.exact_loss.layouts_program"
DIES = (4, 2)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """Return the gradients of all weights by HF name, for each layout and cut."""
    folder = tmp_path_factory.mktemp("layouts")
    model = build_model()
    model.lm_head.weight.data.mul_(0.1)  # for the same reason as in whole_pass.write_reference
    model.save_pretrained(folder / "checkpoint")
    torch.save({"batch": make_batch()}, folder / "reference.pt")
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found = {}
    for dies in DIES:
        run_ranks(PROGRAM, dies, folder, imported=MEGATRON)
        ranks = [torch.load(folder / f"rank{rank}of{dies}.pt", weights_only=True) for rank in range(dies)]
        found |= {name: whole([rank[name] for rank in ranks], shapes) for name in ranks[0]}
    return found


def whole(ranks, shapes):
    """Assemble the ranks' slices of the gradients, and check that every element of every trained weight is there."""
    names = {hf_name for slices in ranks for hf_name, *_ in slices}
    made = {name: torch.full(shapes[name], torch.nan) for name in names}
    for slices in ranks:
        for hf_name, bounds, values in slices:
            made[hf_name][tuple(slice(*interval) for interval in bounds)] = values
    assert not any(values.isnan().any() for values in made.values())
    return made


def difference(left, right):
    assert left.keys() == right.keys()
    apart = sum((left[name].double() - right[name].double()).square().sum() for name in left)
    return (apart / sum(values.double().square().sum() for values in left.values())).sqrt().item()


def test_gradients_do_not_depend_on_dies_parallel_sizes_and_cut(gradients):
    exact = {name: found for name, found in gradients.items() if "upstream" not in name}
    assert len(exact) == 14 and len(next(iter(exact.values()))) > 1500, "every expert of three layers"
    worst = {f"{a}; {b}": difference(exact[a], exact[b]) for a, b in combinations(exact, 2)}
    assert max(worst.values()) < TOLERANCE, max(worst.items(), key=lambda each: each[1])


def test_upstreams_gradients_depend_on_the_cut(gradients):
    """Without the feature, changing the cut into micro batches is enough to change them."""
    for name in ("data4", "data2"):
        one, four = (gradients[f"{name}, upstream's of {micro}"] for micro in (1, 4))
        assert difference(one, four) > NOTICEABLE
