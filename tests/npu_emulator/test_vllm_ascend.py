"""vLLM with unmodified vllm-ascend generates on the emulated NPU what transformers generates on the CPU."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.npu_emulator.vllm_ascend_program import (
    CAPTURED_SIZES,
    DENSE,
    EVERYTHING,
    FAULTY,
    FULL_GRAPHS,
    MIXTURES,
    SELECTED,
    TOKENS,
    chosen_cases,
    is_right,
    settings_of,
)
from tests.vllm_cases import pairs_of
from tests.vllm_process import run_vllm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm_ascend") is None, reason="vllm-ascend is not installed"),
]
SMALL = 1e-4
NAMES = [case.name for case in SELECTED]
IN_TORCHAIR_GRAPHS = [case.name for case in SELECTED if case.graph is not None and case.model in MIXTURES]
# Pieces of a model with two layers: the parts before, between and after their attention, or everything in one.
PIECES = {
    case.name: 1 if "full" in case.graph else 3 for case in SELECTED if case.graph is not None and case.model in DENSE
}
IN_CHUNKS = [case for case in SELECTED if case.chunks]


def run(folder: Path, *cases: str, seconds: float = 1500) -> dict:
    """Run the cases, by default the selected ones, and return the results, which `folder` keeps."""
    run_vllm("tests.npu_emulator.vllm_ascend_program", folder, *cases, seconds=seconds)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("vllm_ascend"))


def calls_of(operator: str, calls: dict[str, int]) -> int:
    """Return the calls of all versions of an operator."""
    return sum(number for name, number in calls.items() if name.startswith(operator))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(found, name):
    assert found[name]["equal"] == found[name]["again"] == found[name]["of"] == 256
    assert found[name]["worst"] < SMALL


@pytest.mark.parametrize("name", NAMES)
def test_another_prompt_gives_other_tokens(found, name):
    assert found[name]["wrong prompt"] < found[name]["of"]


@pytest.mark.parametrize("name", [case.name for case in FAULTY])
def test_faults_show_in_the_tokens(found, name):
    assert found[name]["equal"] < found[name]["of"] == 256


@pytest.mark.parametrize("name", IN_TORCHAIR_GRAPHS)
def test_torchair_graphs_were_captured_and_ran(found, name):
    operators = found[name]["operators"]
    assert found[name]["graphs"] > 0
    assert calls_of("aclnnFusedInferAttentionScore", operators) > 0
    assert calls_of("AtbMLA", operators) == 0


@pytest.mark.parametrize("name", NAMES)
def test_acl_graphs_were_captured_and_replayed_at_every_step(found, name):
    """All pieces of the model are replayed for each token but the first, both times that it generates."""
    captured, replayed, pieces = found[name]["captured"], found[name]["replayed"], PIECES.get(name, 0)
    assert captured == pieces * len(CAPTURED_SIZES)
    assert replayed == pieces * (replayed // max(pieces, 1)) and replayed >= pieces * 2 * (TOKENS - 1)


def test_the_covering_selection_has_every_pair_of_settings():
    chosen = chosen_cases(["pairs"])
    everything = [case for case in EVERYTHING if case.layout != "tp16ep"]
    met, all_pairs = (set().union(*(pairs_of(settings_of(case)) for case in cases)) for cases in (chosen, everything))
    assert met == all_pairs
    assert {(case.model, case.layout[:3]) for case in chosen} >= {
        (model, layout) for model in (*DENSE, *MIXTURES) for layout in ("tp1", "tp2", "dp2")
    }
    assert len(chosen) < len(everything) / 4


@pytest.mark.parametrize("case", IN_CHUNKS, ids=lambda case: case.name)
def test_prompts_were_taken_in_chunks(found, case):
    """The operator that reads the earlier chunks of a prompt from the cache was called."""
    of_dense_models, of_mixtures = "PagedAttentionSplitfuse", "AtbPagedCacheLoad"
    assert calls_of(of_dense_models if "qwen" in case.model else of_mixtures, found[case.name]["operators"]) > 0


@pytest.mark.parametrize("case", SELECTED, ids=lambda case: case.name)
def test_the_cache_of_prefixes_is_used_where_it_is_on(found, case):
    assert (found[case.name]["cached"] > 0) == case.prefix_cache


def test_an_engine_that_has_slept_gives_the_same_tokens(found):
    """`again` of this case are the tokens generated after it had slept, with its memory given back to the die.

    Its graphs were captured before, and use the weights and the cache at their old addresses.
    """
    assert found["qwen2 tp1 sleeps graph"]["again"] == 256
    assert found["qwen2 tp1 sleeps graph"]["freed in sleep"] > 64 << 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", ["", "1"], ids=["at once", "streams"])
def test_attention_in_graphs_is_replaced_before_each_replay(tmp_path, monkeypatch, seed):
    """If its update does nothing, the tokens differ."""
    monkeypatch.setenv("NPU_EMULATOR_STREAM_SEED", seed)
    results = run(tmp_path, *(case.name for case in FULL_GRAPHS))
    assert [case.name for case in FULL_GRAPHS if not is_right(case, results[case.name])] == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_any_two_settings_give_the_tokens_of_transformers_and_faults_do_not(tmp_path):
    """The cases are the selection of the 146 in which any two settings meet."""
    cases = [*chosen_cases(["pairs"]), *FAULTY]
    results = run(tmp_path, *(case.name for case in cases), seconds=3600)
    assert [case.name for case in cases if not is_right(case, results[case.name])] == []
