"""Gradients of verl's Megatron actor and critic compared with one plain pass over the batch, for every cut of it.

The error is the norm of the difference over the norm of the expected gradients, over all weights and ranks.
"""

import json
import math

import pytest
import torch

from tests.forked import MEGATRON
from tests.post_training.models.megatron.qwen3_checkpoint import SIZES
from tests.ranks import run_ranks
from tests.verl_patches.features.exact_loss.value_pass import write_value_reference
from tests.verl_patches.features.exact_loss.whole_pass import LENGTHS, NOT_DAPO, OF_DAPO, make_batch, write_reference
from verl_patches.features.dynamic_batches.packing import first_fit

pytestmark = pytest.mark.slow

PROGRAM = "tests.verl_patches.features.exact_loss.gradients_program"
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TOLERANCE = 1e-6
NOTICEABLE = 1e-2
ROUNDING = 2e-6
# In tokens: with 1 every sequence is alone, with 40 only the long ones are; 160 holds several of any length.
ALONE, LIMITS = 1, (40, 160)
EVERY_CUT = {f"{mode} {micro}": {"mode": mode, "micro": micro} for mode in MODES for micro in (1, 2, 4, 8)}
EVERY_CUT |= {f"{mode} at most {limit}": {"mode": mode, "limit": limit} for mode in MODES for limit in LIMITS}
FEW_CUTS = {
    name: EVERY_CUT[name]
    for name in (
        "token-mean 2",
        "seq-mean-token-sum 8",
        "seq-mean-token-mean 4",
        "token-mean at most 160",
        "seq-mean-token-mean at most 40",
    )
}
OF_CRITIC = {
    name: EVERY_CUT[name] for name in ("token-mean 2", "seq-mean-token-mean 8", "seq-mean-token-sum at most 160")
}
SPOILT = ("bias without its mark", "not added up")
OTHERS = {
    "upstream": {"mode": "token-mean", "micro": 2, "exact": False},
    "two updates, two epochs": {"mode": "token-mean", "micro": 2, "mini": 8, "epochs": 2},
}


def measure(folder, world_size, updates, of_critic):
    """Return the errors of gradients and the losses that the last stage reports, by layout and update."""
    write_reference(folder, MODES)
    write_value_reference(folder, MODES)
    plan = {"updates": updates, "critic": of_critic, "limits": [ALONE, *LIMITS]}
    (folder / "plan.json").write_text(json.dumps(plan))
    run_ranks(PROGRAM, world_size, folder, imported=MEGATRON)
    ranks = [json.loads((folder / f"rank{rank}of{world_size}.json").read_text()) for rank in range(world_size)]
    found = {
        layout: {name: combined([rank[layout][name] for rank in ranks]) for name in updates} for layout in ranks[0]
    }
    for layout, measured in found.items():
        measured |= {limit: [rank[layout][f"log_probs {limit}"] for rank in ranks] for limit in (ALONE, *LIMITS)}
        critics = [rank[layout]["critic"] for rank in ranks]
        measured["critic"] = {name: combined([each[name] for each in critics]) for name in (*of_critic, *SPOILT)}
        measured["values"] = {limit: [each[f"values {limit}"] for each in critics] for limit in (None, max(LIMITS))}
        measured["heads"] = [each["head"] for each in critics if each["head"]]
    return found


def combined(ranks):
    errors = []
    for squares in zip(*(rank["errors"] for rank in ranks), strict=True):
        difference, expected = (sum(part) for part in zip(*squares, strict=True))
        errors.append(math.sqrt(difference / expected))
    for rank in ranks:
        if rank["losses"]:  # on the last stage
            first, *further = rank["losses"]
            # verl reports the policy's loss as a list of one.
            firsts = (one if isinstance(one, list) else [one] for one in first)
            reported = [[*one, *others] for one, *others in zip(firsts, *further, strict=True)]
    told = {"progress": [rank["progress"] for rank in ranks], "expected_losses": ranks[0]["expected_losses"]}
    return {"errors": errors, "losses": reported} | told


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return measure(tmp_path_factory.mktemp("two"), 2, FEW_CUTS | OTHERS | OF_DAPO | NOT_DAPO, OF_CRITIC | OTHERS)


def judge_progress(found, plan):
    """Check the progress counter on every pipeline stage and replica, for the actor and the critic."""
    for layout, updates in found.items():
        for name in (name for name in plan if "limit" not in plan[name]):
            for of_model in (updates, updates["critic"]):
                for count, expected in of_model[name]["progress"] if name in of_model else ():
                    assert count == expected > 0, (layout, name)


def test_every_micro_batch_is_progress_for_the_hang_detector(two):
    judge_progress(two, FEW_CUTS | OTHERS)


def judge(found, plan, tolerance=TOLERANCE):
    for layout, updates in found.items():
        for name in plan:
            worst = max(updates[name]["errors"])
            assert worst < tolerance, f"{layout}, {name}: {worst:.2e}"
            for found_losses, expected in zip(updates[name]["losses"], updates[name]["expected_losses"], strict=True):
                assert found_losses == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_gradients_and_reported_losses_are_those_of_one_pass(two):
    assert len(two) == 3 and max(LENGTHS) == 64 and min(LENGTHS) == 1
    judge(two, FEW_CUTS)


def test_dapos_gradients_and_reported_losses_are_those_of_one_pass(two):
    judge(two, OF_DAPO)


def test_without_a_part_of_dapo_gradients_are_others(two):
    for layout, updates in two.items():
        for name in NOT_DAPO:
            assert updates[name]["errors"][0] > NOTICEABLE, (layout, name, updates[name]["errors"])


def test_each_of_several_updates_is_exact(two):
    for updates in two.values():
        assert len(updates["two updates, two epochs"]["errors"]) == 4
    # Half the batch has smaller gradients: in float32 even its plain pass has an error of 0.9e-6.
    judge(two, ["two updates, two epochs"], 2 * TOLERANCE)


def test_upstreams_gradients_are_others(two):
    for layout, updates in two.items():
        assert updates["upstream"]["errors"][0] > NOTICEABLE, layout
        assert len(updates["upstream"]["losses"]) > 1, "a mean of means"


def judge_log_probs(found):
    """A sequence's log-probs are bit-identical in any order; products with more rows are rounded differently."""
    for layout, measured in found.items():
        for limit in (ALONE, *LIMITS):
            for rank in measured[limit]:
                difference = rank["dynamic"]["difference"]
                assert difference < ROUNDING, f"{layout}, {limit}: {difference:.2e}"
                assert rank["dynamic"]["equal"] or limit != ALONE, f"{layout}: {difference:.2e}"
            assert max(rank["disordered"]["difference"] for rank in measured[limit]) > NOTICEABLE


def test_log_probs_of_dynamic_batches_are_in_the_order_of_the_batch(two):
    judge_log_probs(two)


def test_the_ranks_need_different_numbers_of_micro_batches():
    lengths = make_batch()["attention_mask"].sum(-1).tolist()
    needed = [len(first_fit(part, min(LIMITS))) for part in (lengths[:8], lengths[8:])]
    assert needed[0] != needed[1] and max(lengths) > min(LIMITS)


def of_critic(found):
    return {layout: measured["critic"] for layout, measured in found.items()}


def judge_values(found):
    """Products with more rows are rounded differently, and the plain pass is in float64."""
    for layout, measured in found.items():
        for limit, ranks in measured["values"].items():
            for rank in ranks:
                assert rank["difference"] < 1e-4 < 1e-1 < rank["disordered"], (layout, limit, rank)


def test_the_critics_gradients_and_reported_losses_are_those_of_one_pass(two):
    judge(of_critic(two), OF_CRITIC)
    judge(of_critic(two), ["two updates, two epochs"], 2 * TOLERANCE)


def test_upstreams_gradients_of_the_critic_are_others(two):
    for layout, updates in of_critic(two).items():
        assert updates["upstream"]["errors"][0] > NOTICEABLE, layout


def test_the_bias_of_a_critic_needs_its_mark_under_sequence_parallelism(two):
    for layout, updates in of_critic(two).items():
        (error,) = updates["bias without its mark"]["errors"]
        assert (error > NOTICEABLE) == (layout == "tensor2"), (layout, error)


def test_missing_critic_gradient_sum_detected(two):
    for layout, updates in of_critic(two).items():
        (error,) = updates["not added up"]["errors"]
        assert (error > NOTICEABLE) == (layout != "pipeline2"), (layout, error)


def test_values_are_those_of_one_pass_in_the_order_of_the_batch(two):
    judge_values(two)


def test_every_layout_begins_with_the_same_head(two):
    heads = [head for measured in two.values() for head in measured["heads"]]
    assert len(heads) == 5 and all(head == heads[0] for head in heads)
    bias, weight = heads[0]
    assert bias == [0.0] and torch.tensor(weight).std().item() == pytest.approx(SIZES["initializer_range"], rel=0.3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_gradients_of_every_layout_and_cut(tmp_path, world_size):
    found = measure(tmp_path, world_size, EVERY_CUT | OF_DAPO, EVERY_CUT)
    assert len(found) == {1: 1, 2: 3, 4: 3, 8: 1}[world_size]
    judge(found, EVERY_CUT | OF_DAPO)
    judge_log_probs(found)
    judge(of_critic(found), EVERY_CUT)
    judge_values(found)
