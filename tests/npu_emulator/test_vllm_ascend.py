"""vLLM with unmodified vllm-ascend generates on the emulated NPU what transformers generates on the CPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.npu_emulator.vllm_ascend_program import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm_ascend") is None, reason="vllm-ascend is not installed"),
]
SMALL = 1e-4


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("vllm_ascend")
    environment = os.environ | {"NPU_EMULATOR_CAPACITY_MB": "512", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.npu_emulator.vllm_ascend_program", str(folder)],
        env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(found, case):
    assert found[case]["equal"] == found[case]["again"] == found[case]["of"] == 256
    assert found[case]["worst"] < SMALL


def test_an_engine_that_has_slept_gives_the_same_tokens(found):
    """`again` of this case is what it generated after it had slept, with its memory given back to the die."""
    assert CASES["qwen2"][1]["enable_sleep_mode"] and found["qwen2"]["again"] == 256
    assert found["qwen2"]["freed in sleep"] > 64 << 20


@pytest.mark.parametrize("case", CASES)
def test_another_prompt_gives_other_tokens(found, case):
    assert found[case]["wrong prompt"] < found[case]["of"]
