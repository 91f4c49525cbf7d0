"""vLLM with unmodified vllm-ascend generates on the emulated NPU what transformers generates on the CPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.npu_emulator.vllm_ascend_program import FAULTY, SELECTED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm_ascend") is None, reason="vllm-ascend is not installed"),
]
SMALL = 1e-4
NAMES = [case.name for case in SELECTED]
IN_GRAPHS = [case.name for case in SELECTED if case.graph is not None]
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


@pytest.mark.parametrize("name", IN_GRAPHS)
def test_graphs_were_captured_and_ran(found, name):
    operators = found[name]["operators"]
    assert found[name]["graphs"] > 0
    assert operators["npu::npu_fused_infer_attention_score"] > 0
    assert "atb::npu_multi_head_latent_attention" not in operators


@pytest.mark.parametrize("case", IN_CHUNKS, ids=lambda case: case.name)
def test_prompts_were_taken_in_chunks(found, case):
    """What reads the earlier chunks of a prompt from the cache was called."""
    of_dense_models, of_mixtures = "atb::_npu_paged_attention_splitfuse", "atb::npu_paged_cache_load"
    assert found[case.name]["operators"][of_dense_models if "qwen" in case.model else of_mixtures] > 0


@pytest.mark.parametrize("case", SELECTED, ids=lambda case: case.name)
def test_the_cache_of_prefixes_is_used_where_it_is_on(found, case):
    assert (found[case.name]["cached"] > 0) == case.prefix_cache


def test_an_engine_that_has_slept_gives_the_same_tokens(found):
    """`again` of this case is what it generated after it had slept, with its memory given back to the die."""
    assert found["qwen2 tp1 sleeps"]["again"] == 256
    assert found["qwen2 tp1 sleeps"]["freed in sleep"] > 64 << 20
