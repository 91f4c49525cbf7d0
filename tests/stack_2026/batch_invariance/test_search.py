"""Search for operators that depend on the batch, in unmodified vLLM-Ascend 0.23 and in its batch-invariant mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.stack_2026.batch_invariance.engines import run_engine
from tests.stack_2026.vllm_ascend.models import write_checkpoint
from verl_plugin.batch_invariance.jobs import Job
from verl_plugin.batch_invariance.report import differs, table
from verl_plugin.batch_invariance.situations import AGAIN, SITUATIONS

pytestmark = pytest.mark.slow
PLANTED = "tests.stack_2026.batch_invariance.planted"
LINEAR, ATTENTION = "aten.linear.default", "npu.npu_fused_infer_attention_score.default"
CHUNKED = {each.name for each in SITUATIONS if each.chunk or each.cached}
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function that runs an engine on a model, with the mode on or off; each combination runs once."""
    folder, known = tmp_path_factory.mktemp("batch_invariance"), {}

    def run_once(model: str, mode: str, planted: str = "") -> dict[str, Any]:
        key = (model, mode, planted)
        if key not in known:
            if not (folder / model).is_dir():
                write_checkpoint(model, folder / model)
            known[key] = run_engine(Job(str(folder / model), planted=planted), mode, folder / str(len(known)))
        return known[key]

    return run_once


def differing(result: dict[str, Any]) -> set[str]:
    assert all(each["compared"] for each in result["compared"].values())
    return {name for name, each in result["compared"].items() if each["differ"]}


def test_without_the_mode_two_operators_depend_on_the_batch(run):
    result = run("qwen3", "0")
    assert differing(result) == {each.name for each in SITUATIONS}
    assert [each["operator"] for each in result["operators"]] == [LINEAR, ATTENTION]
    linear, attention = result["operators"]
    assert linear["layer"].endswith("qkv_proj") and attention["layer"].endswith("self_attn.attn")
    assert set(attention["situations"]) == CHUNKED, "a query's attention depends on chunks, and not on neighbours"
    assert result["ended"] == ""


def test_same_batch_gives_the_same_log_probs(run):
    assert run("qwen3", "0")["compared"][AGAIN.name]["differ"] == 0


def test_mode_of_upstream_keeps_log_probs_in_as_many_slot_steps(run):
    off, on = run("qwen3", "0"), run("qwen3", "1")
    assert differing(on) == set() and on["operators"] == [] and on["ended"] == ""
    assert on["alone"]["tokens"] == off["alone"]["tokens"] and on["alone"] != off["alone"]
    assert (on["steps"], on["slot_steps"]) == (off["steps"], off["slot_steps"])
    off, on = (each | {"graphs": {}} for each in (off, on))
    assert differs(off) and not differs(on) and differs(on | {"graphs": {"other weights": off}})
    lines = table({"off": off, "on": on})
    assert "mode on: none" in lines and f"mode off: {LINEAR}" in lines


def test_planted_operator_is_named(run):
    (found,) = run("qwen3", "1", PLANTED)["operators"]
    assert found["operator"] == "npu.npu_swiglu.default" and found["layer"] == "model.layers.0.mlp.act_fn"
    assert differing(run("qwen3", "1", PLANTED))


def test_mode_of_upstream_leaves_out_products_with_a_bias(run):
    """vLLM-Ascend 0.23 replaces `addmm` only by a Triton kernel, and Triton has no device here."""
    result = run("qwen2.5", "1")
    assert differing(result)
    assert [each["operator"] for each in result["operators"]] == [LINEAR]
    assert len(result["operators"][0]["alone"]) == 3, "input, weight, bias"
