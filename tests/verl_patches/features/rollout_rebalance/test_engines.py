"""Engines that migrate requests between them generate what engines without migration do, in smaller graphs."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.verl_patches.features.rollout_rebalance.cases import CASES, DEALT, EVERY
from tests.verl_patches.features.rollout_rebalance.runs import Found, run_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm_ascend") is None, reason="vllm-ascend is not installed"),
]
MOVING = [name for name, case in CASES.items() if set(EVERY) <= set(case.runs)]
EXPENSIVE = ["four", *(name for name, case in CASES.items() if case.part or set(DEALT) <= set(case.runs))]


@pytest.fixture(scope="module")
def found(tmp_path_factory, pytestconfig) -> Found:
    """Return the results of every rank by case; expensive cases run only in an exhaustive run."""
    names = [name for name in CASES if name not in EXPENSIVE or pytestconfig.getoption("exhaustive")]
    names = [name for name in names if not name.startswith("preempts")]
    return run_cases(tmp_path_factory.mktemp("rebalance"), names)


def answers(found: Found, case: str, run: str, what: str) -> list[Any]:
    return [of_rank[run][what] for of_rank in found[case]]


def metric(found: Found, case: str, run: str, name: str) -> float:
    """Return a metric of the decode loop, which is equal on all ranks."""
    (value,) = {of_rank[run]["metrics"][name] for of_rank in found[case]}
    return value


def ratio(found: Found, case: str, run: str) -> float:
    return metric(found, case, run, "slot_steps") / metric(found, case, run, "slot_steps_bound")


def marked(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.exhaustive) if name in EXPENSIVE else name for name in names]


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("case", marked(MOVING))
def test_tokens_order_and_finish_reasons_are_those_without_moves(found, case, kind):
    assert metric(found, case, f"{kind} on", "moved_requests") > 0
    for what in ("tokens", "reasons", "device's numbers"):
        assert answers(found, case, f"{kind} on", what) == answers(found, case, f"{kind} off", what)
    pairs = zip(*(answers(found, case, f"{kind} {moves}", "log_probs") for moves in ("on", "off")), strict=True)
    for moved, stayed in pairs:
        # The keys and values of a migrated request are recomputed, all at once.
        assert all(one == pytest.approx(other, abs=1e-5) for one, other in zip(moved, stayed, strict=True))


def test_drawn_answers_ended_in_both_ways(found):
    assert {reason for of_rank in answers(found, "two", "seeded on", "reasons") for reason in of_rank} == {
        "stop",
        "length",
    }


@pytest.mark.parametrize("case", marked(["four", "eight"]))
def test_the_last_answers_run_in_small_graphs_near_the_bound(found, case):
    assert ratio(found, case, "greedy off") >= 2.5 > 1.15 >= ratio(found, case, "greedy on")


def test_moves_save_slot_steps(found):
    for case in found.keys() & set(MOVING):
        print(case, *(table_row(found, case, run) for run in CASES[case].runs if ": " not in run), sep="\n  ")
        assert ratio(found, case, "greedy off") > ratio(found, case, "greedy on")


def table_row(found: Found, case: str, run: str) -> str:
    names = ("slot_steps", "slot_steps_bound", "decode_steps", "agreements", "moved_requests")
    metrics = {name: found[case][0][run]["metrics"].get(name) for name in names}
    return f"{run}: {ratio(found, case, run):.3f} {metrics}"


def by_place(found: Found, case: str, run: str, what: str) -> list[Any]:
    """Return the values of all answers, ordered by the place of their prompts among those of all engines."""
    pairs = zip(answers(found, case, run, "places"), answers(found, case, run, what), strict=True)
    of_places = sorted(
        (place, number, value)
        for places, values in pairs
        for number, (place, value) in enumerate(zip(places, values, strict=True))
    )
    return [value for _, _, value in of_places]


@pytest.mark.exhaustive
@pytest.mark.parametrize("moves", ["off", "on"])
@pytest.mark.parametrize("case", ["by length", "eight"])
def test_prompts_that_are_dealt_out_by_length_get_the_same_answers(found, case, moves):
    assert answers(found, case, f"placed {moves}", "places") != answers(found, case, "dealt off", "places")
    for what in ("tokens", "reasons"):
        assert by_place(found, case, f"placed {moves}", what) == by_place(found, case, "dealt off", what)
    for placed, dealt in zip(
        by_place(found, case, f"placed {moves}", "log_probs"),
        by_place(found, case, "dealt off", "log_probs"),
        strict=True,
    ):
        assert placed == pytest.approx(dealt, abs=1e-5)
    assert ratio(found, case, f"placed {moves}") < ratio(found, case, "dealt off") / 1.5


@pytest.mark.exhaustive
def test_seeds_by_the_place_in_an_engine_give_other_tokens(found):
    """A control: the seeds are not the prompts' own."""
    run = "placed off: seeds by place"
    assert by_place(found, "by length", run, "tokens") != by_place(found, "by length", "dealt off", "tokens")


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_graphs_of_several_sizes_give_the_tokens_of_one_size_in_fewer_slot_steps(found, kind):
    run = f"{kind} off"
    assert answers(found, "two", run, "tokens") == answers(found, "one size", run, "tokens")
    assert metric(found, "two", run, "slot_steps") < metric(found, "one size", run, "slot_steps")
    assert metric(found, "two", run, "decode_steps") == metric(found, "one size", run, "decode_steps")


def test_noise_that_begins_anew_at_a_move_gives_other_tokens(found):
    """A control: the published rebalance re-seeds the generator."""
    run = "seeded on: drawn anew"
    assert metric(found, "two", run, "moved_requests") > 0
    assert answers(found, "two", run, "tokens") != answers(found, "two", "seeded off", "tokens")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_prompts_in_parts_give_the_tokens_of_whole_ones(found, kind):
    assert metric(found, "cut", f"{kind} off", "prefill_steps") > metric(found, "two", f"{kind} off", "prefill_steps")
    for what in ("tokens", "reasons", "device's numbers"):
        assert answers(found, "cut", f"{kind} off", what) == answers(found, "two", f"{kind} off", what)


@pytest.mark.exhaustive
def test_parts_that_draw_from_a_requests_random_numbers_give_other_tokens(found):
    """A control: vLLM-Ascend restores the numbers by a guess."""
    drawn = answers(found, "cut", "seeded off: a part draws", "tokens")
    assert drawn != answers(found, "two", "seeded off", "tokens")


@pytest.mark.exhaustive
def test_parts_that_draw_from_the_devices_random_numbers_change_what_later_requests_get(found):
    """A control: the tokens are right, but the seeds of the next rollout differ."""
    run = "seeded on: the device's numbers go on"
    assert answers(found, "cut", run, "tokens") == answers(found, "two", "seeded off", "tokens")
    numbers = answers(found, "cut", run, "device's numbers")
    assert numbers != answers(found, "two", "seeded off", "device's numbers")


def test_results_that_do_not_come_home_are_missed(found):
    """A control: the published rebalance does not return the results."""
    complete = [len(tokens) for tokens in answers(found, "two", "greedy on", "tokens")]
    left = [len(tokens) for tokens in answers(found, "two", "greedy on: nothing comes home", "tokens")]
    assert sum(left) < sum(complete)
