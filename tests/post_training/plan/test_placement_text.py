"""Parsing of placements given on the command line."""

import pytest

from post_training.layouts.layout import TrainPlacement
from post_training.plan.placement_text import KNOWN, parse_bytes, parse_model, parse_placements


def test_what_is_not_said_is_one():
    train, rollout = parse_placements("pp2", "ep4", 8)
    assert (rollout.tp, rollout.dp, rollout.ep, rollout.instances) == (1, 4, 4, 1)
    assert rollout.shared_expert_replicated
    assert train == TrainPlacement(tp=1, pp=2, ep=1, dp=2, num_layer_list=(4, 4), moe_tp_extend_ep=False)


def test_everything_can_be_said():
    train, rollout = parse_placements("tp2,pp1,ep2,dp2,tp_extend,layers=8", "tp2,dp1,ep2,instances2,shared_tp", 8)
    assert (rollout.tp, rollout.dp, rollout.ep, rollout.instances) == (2, 1, 2, 2)
    assert not rollout.shared_expert_replicated
    assert train == TrainPlacement(tp=2, pp=1, ep=2, dp=2, num_layer_list=(8,), moe_tp_extend_ep=True)


@pytest.mark.parametrize(
    "train, rollout, says",
    [
        ("pp3", "ep3", "8 layers do not divide over pp3"),
        ("pp2,layers=4/x", "ep2", "layers=4/x: not a list"),
        ("tp2,dp2", "ep2", "training has 4 ranks, but the rollout 2"),
    ],
)
def test_misfit_rejected(train, rollout, says):
    with pytest.raises(ValueError, match=says):
        parse_placements(train, rollout, 8)


@pytest.mark.parametrize("text", ["0", "0GiB", "GiB", "1.5GiB", "-1", ""])
def test_a_size_is_a_whole_number_of_a_unit(text):
    assert parse_bytes("2KiB") == 2048
    with pytest.raises(ValueError, match="not a size such as"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("rollout", "dp"), [("tp2,ep4", 2), ("tp2,ep8", 4), ("tp4", 1), ("tp2,ep8,dp4", 4), ("tp2,dp3", 3)]
)
def test_a_rollout_has_as_many_data_parallel_ranks_as_its_experts_need(rollout, dp):
    train, placement = parse_placements("pp1", rollout, 8)
    assert placement.dp == dp and train.dp == train.world_size == placement.tp * dp


@pytest.mark.parametrize("word", ["tp", "tp0", "4", "shared", "2tp", "dp-1", ""])
def test_an_unknown_word_is_named(word):
    with pytest.raises(
        ValueError, match=f"--rollout tp2,{word}: unknown word {word!r}. Known are tp, dp, ep, instances"
    ):
        parse_placements("tp2", f"tp2,{word}", 8)


def test_a_model_is_a_known_name_or_a_whole_file(tmp_path):
    name = next(iter(KNOWN))
    assert parse_model(name).shapes == KNOWN[name]().shapes
    with pytest.raises(ValueError, match="--model=absent is invalid: neither "):
        parse_model("absent")
    file = tmp_path / "config.json"
    for text, says in (("[]", "is JSON with a list"), ("{", "not a config.json"), ("\xff", "not a config.json")):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=says):
            parse_model(str(file))


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("3KiB", 3072), ("2MiB", 2**21), ("5GiB", 5 * 2**30)])
def test_sizes_are_bytes(text, size):
    assert parse_bytes(text) == size
