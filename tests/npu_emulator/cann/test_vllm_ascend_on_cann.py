"""vLLM with unmodified vllm-ascend on the published torch_npu and the emulated CANN, against transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_emulator.cann.engine_process import ROOT
from tests.npu_emulator.vllm_ascend_program import CAPTURED_SIZES, FAULTY, FULL_GRAPHS, TOKENS, chosen_cases, is_right

CASES = ("qwen2 tp1 sleeps graph", "deepseek256 tp1 graph mla moe", "deepseek8 tp2ep", "qwen2 tp1 graph full")


def run(folder: Path, *cases: str, seconds: float) -> dict:
    """What was found in the cases, which `folder` keeps."""
    environment = {**os.environ, "NPU_EMULATOR_ENGINE": "cann", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.npu_emulator.vllm_ascend_program", folder, *cases]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("vllm_ascend_on_cann"), *CASES, seconds=580)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(found, case):
    assert "failed" not in found[case]
    assert found[case]["equal"] == found[case]["of"] == found[case]["again"]
    assert found[case]["wrong prompt"] < found[case]["of"], "control: another prompt gives other tokens"


@pytest.mark.slow
def test_graphs_are_captured_and_run_where_they_are_asked_for(found):
    """Dense models run in ACL graphs, in three pieces of each size or in one; mixtures in torchair's, node by node."""
    dense, mixture, eager, full = (found[case] for case in CASES)
    assert dense["captured"] == 3 * len(CAPTURED_SIZES) and dense["replayed"] >= 3 * 2 * (TOKENS - 1)
    assert full["captured"] == len(CAPTURED_SIZES) and full["replayed"] == 2 * (TOKENS - 1)
    assert mixture["graphs"] > 0 and mixture["operators"]["npu::npu_fused_infer_attention_score"] > 0
    assert eager["captured"] == eager["replayed"] == mixture["captured"] == 0
    assert "npu::npu_fused_infer_attention_score" not in eager["operators"]


@pytest.mark.slow
def test_memory_is_free_while_the_engine_sleeps(found):
    freed = {case: found[case]["freed in sleep"] for case in CASES}
    assert freed.pop("qwen2 tp1 sleeps graph") > 1 << 30
    assert set(freed.values()) == {0}, "control: the others do not sleep"


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", ["", "1"], ids=["at once", "streams"])
def test_attention_in_graphs_is_replaced_before_each_replay(tmp_path, monkeypatch, seed):
    """And where its update does nothing, the tokens are others."""
    monkeypatch.setenv("NPU_EMULATOR_STREAM_SEED", seed)
    figures = run(tmp_path, *(case.name for case in FULL_GRAPHS), seconds=1200)
    assert [case.name for case in FULL_GRAPHS if not is_right(case, figures[case.name])] == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_any_two_settings_give_the_tokens_of_transformers_and_faults_do_not(tmp_path):
    """The selection of the stand-in's 146 cases in which any two settings meet."""
    cases = [*chosen_cases(["pairs"]), *FAULTY]
    figures = run(tmp_path, *(case.name for case in cases), seconds=3600)
    assert [case.name for case in cases if not is_right(case, figures[case.name])] == []
