"""Unmodified vLLM 0.23 with vLLM-Ascend 0.23 generates on the emulated NPU what transformers generates on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stack_2026.vllm_ascend.program import (
    CAPTURED_SIZES,
    EVERYTHING,
    FAULTY,
    IMPOSSIBLE,
    LOST,
    MENDED,
    SELECTED,
    TOKENS,
    WRONG,
    Case,
    is_right,
    tolerance,
)
from tests.vllm_process import run_vllm

pytestmark = pytest.mark.slow


def run(folder: Path, *cases: str, seconds: float = 1500) -> dict[str, dict[str, Any]]:
    """Run cases, by default the selected ones, and return their results by name; `folder` keeps them."""
    run_vllm("tests.stack_2026.vllm_ascend.program", folder, *cases, seconds=seconds)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run(tmp_path_factory.mktemp("vllm_ascend"))


def ids(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", SELECTED, ids=ids)
def test_greedy_tokens_equal_transformers(found, case):
    results = found[case.name]
    kinds = ("equal", "again") if case.dtype == "float32" else ("close", "again close")
    assert [results[kind] for kind in kinds] == [results["of"]] * 2 == [96, 96]
    assert results["worst"] <= tolerance(case, results)


@pytest.mark.parametrize("case", SELECTED, ids=ids)
def test_another_prompt_gives_other_tokens(found, case):
    assert found[case.name]["wrong prompt"] < found[case.name]["of"]


@pytest.mark.parametrize("case", SELECTED, ids=ids)
def test_seed_decides_what_is_sampled(found, case):
    assert found[case.name]["same seed"] and found[case.name]["other seed"]


@pytest.mark.parametrize("case", FAULTY, ids=ids)
def test_faults_show_in_the_tokens(found, case):
    assert found[case.name]["equal"] < found[case.name]["of"]


@pytest.mark.parametrize("case", SELECTED, ids=ids)
def test_graphs_are_captured_and_replayed(found, case):
    captured, replayed = found[case.name]["captured"], found[case.name]["replayed"]
    if case.graph == "eager":
        assert captured == replayed == 0
    else:
        assert captured >= len(CAPTURED_SIZES) and replayed >= 2 * (TOKENS - 1)


@pytest.mark.parametrize("case", SELECTED, ids=ids)
def test_cache_of_prefixes_is_used_where_it_is_on(found, case):
    assert (found[case.name]["cached"] > 0) == case.prefix_cache


@pytest.mark.parametrize("case", [case for case in SELECTED if case.sleeps], ids=ids)
def test_sleeping_engine_frees_its_weights(found, case):
    """Check the freed bytes. `again` of these cases was generated after sleep, in graphs captured before it."""
    assert found[case.name]["freed in sleep"] > 16 << 20


@pytest.mark.parametrize("case", IMPOSSIBLE, ids=ids)
def test_upstream_rejects_what_is_listed_as_impossible(found, case):
    reasons = found[case.name]["reasons"]
    assert reasons and all(IMPOSSIBLE[case] in reason for reason in reasons)


@pytest.mark.parametrize("case", MENDED.values(), ids=ids)
def test_no_token_is_lost_with_this_projects_worker(found, case):
    """With upstream's worker, these settings (`WRONG`) lose tokens."""
    assert is_right(case, found[case.name]), found[case.name]


def test_upstreams_worker_loses_tokens(found):
    """Control: if it passes, upstream has fixed the bug."""
    assert not is_right(LOST, found[LOST.name]) and LOST in WRONG


@pytest.mark.exhaustive
@pytest.mark.timeout(14400)
def test_every_setting_gives_the_tokens_of_transformers(tmp_path):
    results = run(tmp_path, "all", seconds=14400)
    wrong = {case for case in EVERYTHING if not is_right(case, results[case.name])}
    assert wrong == WRONG.keys(), sorted(case.name for case in wrong ^ WRONG.keys())
