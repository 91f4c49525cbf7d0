"""Engines that end a rollout early and resume its answers generate what an uninterrupted rollout would."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.verl_patches.features.partial_rollout.cases import CASES, FAULTS, LONGEST
from tests.vllm_process import run_vllm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(importlib.util.find_spec("vllm_ascend") is None, reason="vllm-ascend is not installed"),
]
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    """Return the results of every rank, by case."""
    folder = tmp_path_factory.mktemp("partial")
    run_vllm("tests.verl_patches.features.partial_rollout.engine_program", folder)
    return {
        name: [json.loads((folder / name / f"found.{rank}.json").read_text()) for rank in range(case.ranks)]
        for name, case in CASES.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_answers_that_were_left_and_taken_up_are_those_of_an_unbroken_rollout(found, case):
    for of_rank in found[case]:
        unbroken, stopped = of_rank["unbroken"], of_rank["stopped"]
        assert stopped["tokens"] == unbroken["tokens"]
        # The keys and values of a resumed answer are recomputed, all at once.
        pairs = zip(stopped["log_probs"], unbroken["log_probs"], strict=True)
        assert all(one == pytest.approx(other, abs=1e-5) for one, other in pairs)
    assert {max(map(len, of_rank["unbroken"]["tokens"])) for of_rank in found[case]} == {LONGEST}


@pytest.mark.parametrize("case", CASES)
def test_a_rollout_ends_when_enough_groups_of_all_engines_are_finished_and_one_that_is_due_is(found, case):
    engines = found[case][:: CASES[case].tensor_parallel]
    for number, passes in enumerate(zip(*(each["stopped"]["passes"] for each in engines), strict=True)):
        left = sum(reason == "abort" for each in passes for reason in each["reasons"])
        finished = sum(len(each["reasons"]) for each in passes) - left
        assert finished >= passes[0]["needed"]
        assert left if number == 0 else True, "the first rollout has left some"
        assert number != 1 or all(each["reasons"][-1] != "abort" for each in passes)
    assert left == 0


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.ranks > 1])
def test_all_engines_end_in_the_same_forward_and_sooner(found, case):
    first = {of_rank["stopped"]["passes"][0]["decode_steps"] for of_rank in found[case]}
    assert len(first) == 1
    assert first.pop() < min(of_rank["unbroken"]["decode_steps"] for of_rank in found[case])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", CASES)
def test_an_answer_that_is_taken_up_wrongly_is_another(found, case, fault):
    """The controls: an answer resumes without its tokens, or with its whole length again."""
    assert any(of_rank[f"stopped: {fault}"]["tokens"] != of_rank["unbroken"]["tokens"] for of_rank in found[case])
