"""vLLM with unmodified vllm-ascend generates on the emulated NPU what transformers generates on the CPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.npu_emulator.vllm_ascend_program import (
    CAPTURED_SIZES,
    DENSE,
    EVERYTHING,
    FAULTY,
    MIXTURES,
    SELECTED,
    TOKENS,
    chosen_cases,
    pairs_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm_ascend") is None, reason="vllm-ascend is not installed"),
]
SMALL = 1e-4
NAMES = [case.name for case in SELECTED]
IN_TORCHAIR_GRAPHS = [case.name for case in SELECTED if case.graph is not None and case.model in MIXTURES]
IN_ACL_GRAPHS = [case.name for case in SELECTED if case.graph is not None and case.model in DENSE]
PIECES = 3  # of a model with two layers: what is before, between and after their attention
IN_CHUNKS = [case for case in SELECTED if case.chunks]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("vllm_ascend")
    environment = os.environ | {"NPU_EMULATOR_CAPACITY_MB": "512", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.npu_emulator.vllm_ascend_program", str(folder)],
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


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
    assert operators["npu::npu_fused_infer_attention_score"] > 0
    assert "atb::npu_multi_head_latent_attention" not in operators


@pytest.mark.parametrize("name", NAMES)
def test_acl_graphs_were_captured_and_replayed_at_every_step(found, name):
    """All pieces of the model, for each token but the first, both times that it generates."""
    captured, replayed = found[name]["captured"], found[name]["replayed"]
    if name in IN_ACL_GRAPHS:
        assert captured == PIECES * len(CAPTURED_SIZES)
        assert replayed >= PIECES * 2 * (TOKENS - 1) and replayed % PIECES == 0
    else:
        assert captured == replayed == 0


def test_the_covering_selection_has_every_pair_of_settings():
    chosen = chosen_cases(["pairs"])
    everything = [case for case in EVERYTHING if case.layout != "tp16ep"]
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, everything))
    assert {(case.model, case.layout[:3]) for case in chosen} >= {
        (model, layout) for model in (*DENSE, *MIXTURES) for layout in ("tp1", "tp2", "dp2")
    }
    assert len(chosen) < len(everything) / 4


@pytest.mark.parametrize("case", IN_CHUNKS, ids=lambda case: case.name)
def test_prompts_were_taken_in_chunks(found, case):
    """What reads the earlier chunks of a prompt from the cache was called."""
    of_dense_models, of_mixtures = "atb::_npu_paged_attention_splitfuse", "atb::npu_paged_cache_load"
    assert found[case.name]["operators"][of_dense_models if "qwen" in case.model else of_mixtures] > 0


@pytest.mark.parametrize("case", SELECTED, ids=lambda case: case.name)
def test_the_cache_of_prefixes_is_used_where_it_is_on(found, case):
    assert (found[case.name]["cached"] > 0) == case.prefix_cache


def test_an_engine_that_has_slept_gives_the_same_tokens(found):
    """`again` of this case is what it generated after it had slept, with its memory given back to the die.

    Its graphs were captured before, and use the weights and the cache where they were.
    """
    assert found["qwen2 tp1 sleeps graph"]["again"] == 256
    assert found["qwen2 tp1 sleeps graph"]["freed in sleep"] > 64 << 20
