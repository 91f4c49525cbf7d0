"""Search for operators that depend on the batch, in unmodified vLLM-Ascend 0.23 and in its batch-invariant mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.stack_2026.batch_invariance.engines import Engines
from tests.stack_2026.vllm_ascend.models import write_checkpoint
from verl_plugin.batch_invariance.jobs import Job
from verl_plugin.batch_invariance.report import differs, table
from verl_plugin.batch_invariance.situations import AGAIN, BESIDE_ENGINES, SITUATIONS
from verl_plugin.rollout import WORKER

pytestmark = pytest.mark.slow
PLANTED = "tests.stack_2026.batch_invariance.planted"
LINEAR, ATTENTION = "aten.linear.default", "npu.npu_fused_infer_attention_score.default"
EXPERTS = "npu.npu_grouped_matmul.default"
CHUNKED = {each.name for each in SITUATIONS if each.chunk or each.cached}
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A function that runs an engine on a model with the mode off, upstream's alone, or on; each job runs once."""
    folder, known = tmp_path_factory.mktemp("batch_invariance"), {}
    engines = Engines(folder)

    def run_once(model: str, mode: str, **options: Any) -> dict[str, Any]:
        key = (model, mode, *options.items())
        if key not in known:
            if not (folder / model).is_dir():
                write_checkpoint(model, folder / model)
            job = Job(str(folder / model), worker=WORKER if mode == "on" else "", **options)
            known[key] = engines.run(job, "0" if mode == "off" else "1")
        return known[key]

    yield run_once
    engines.close()


def differing(result: dict[str, Any]) -> set[str]:
    assert all(each["compared"] for each in result["compared"].values())
    return {name for name, each in result["compared"].items() if each["differ"]}


def operators(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what was found of each operator. The order depends on the processor, whose kernels it calls."""
    return {each["operator"]: each for each in result["operators"]}


def test_without_the_mode_two_operators_depend_on_the_batch(run):
    result = run("qwen3", "off")
    assert differing(result) == {each.name for each in SITUATIONS}
    found = operators(result)
    assert found.keys() == {LINEAR, ATTENTION}
    linear, attention = found[LINEAR], found[ATTENTION]
    assert linear["layer"].endswith("qkv_proj") and attention["layer"].endswith("self_attn.attn")
    assert set(attention["situations"]) == CHUNKED, "a query's attention depends on chunks, and not on neighbours"
    assert result["ended"] == ""


def test_same_batch_gives_the_same_log_probs(run):
    assert run("qwen3", "off")["compared"][AGAIN.name]["differ"] == 0


def test_mode_of_upstream_keeps_log_probs_in_as_many_slot_steps(run):
    off, on = run("qwen3", "off"), run("qwen3", "upstream")
    assert differing(on) == set() and on["operators"] == [] and on["ended"] == ""
    assert on["alone"]["tokens"] == off["alone"]["tokens"] and on["alone"] != off["alone"]
    assert (on["steps"], on["slot_steps"]) == (off["steps"], off["slot_steps"])
    off, on = (each | {"graphs": {}} for each in (off, on))
    assert differs(off) and not differs(on) and differs(on | {"graphs": {"other weights": off}})
    lines = table({"off": off, "on": on})
    assert "mode on: none" in lines and f"mode off: {LINEAR}" in lines


def test_planted_operator_is_named(run):
    (found,) = run("qwen3", "upstream", planted=PLANTED)["operators"]
    assert found["operator"] == "npu.npu_swiglu.default" and found["layer"] == "model.layers.0.mlp.act_fn"
    assert differing(run("qwen3", "upstream", planted=PLANTED))


def test_mode_of_upstream_leaves_out_products_with_a_bias(run):
    """vLLM-Ascend 0.23 replaces `addmm` only by a Triton kernel, and Triton has no device here."""
    result = run("qwen2.5", "upstream")
    assert differing(result)
    assert [each["operator"] for each in result["operators"]] == [LINEAR]
    assert len(result["operators"][0]["alone"]) == 3, "input, weight, bias"


@pytest.mark.parametrize("model", ["qwen2.5", "qwen3moe"])
def test_mode_of_this_project_keeps_log_probs_in_as_many_slot_steps(run, model):
    off, on = run(model, "off"), run(model, "on")
    assert differing(off) and differing(on) == set() and on["operators"] == [] and on["ended"] == ""
    assert (on["steps"], on["slot_steps"]) == (off["steps"], off["slot_steps"])


def test_without_the_mode_experts_depend_on_the_batch_too(run):
    result = run("qwen3moe", "off")
    found = operators(result)
    assert found.keys() == {LINEAR, ATTENTION, EXPERTS}
    assert found[EXPERTS]["layer"].endswith("mlp.experts") and result["ended"] == ""


def test_mode_of_upstream_leaves_out_experts(run):
    result = run("qwen3moe", "upstream")
    assert differing(result) and [each["operator"] for each in result["operators"]] == [EXPERTS]


def test_products_of_experts_are_more_calls(run):
    calls = {mode: run("qwen3moe", mode)["calls"] for mode in ("off", "on")}
    assert EXPERTS in calls["off"] and EXPERTS not in calls["on"]
    assert sum(calls["on"].values()) > 1.3 * sum(calls["off"].values())


def test_experts_in_graphs_give_the_bits_of_those_without(run):
    graph = {"graph": "PIECEWISE", "sizes": (1, 2, 4, 8), "search": False}
    result = run("qwen3moe", "on", **graph)
    assert result["alone"] == run("qwen3moe", "on")["alone"] and differing(result) == set()


def test_data_parallel_neighbours_change_log_probs_without_the_mode(run):
    result = run("qwen3moe", "off", engines=2)
    many = {each.name for each in BESIDE_ENGINES if each.elsewhere > 1}
    assert many <= differing(result) and result["ended"] == ""
    assert many <= set(operators(result)[EXPERTS]["situations"])


def test_data_parallel_neighbours_change_no_bit_with_the_mode(run):
    """Experts on two engines are added up as on one, too."""
    result = run("qwen3moe", "on", engines=2)
    assert differing(result) == set() and result["operators"] == [] and result["ended"] == ""
    assert len(result["compared"]) == 1 + len(SITUATIONS) + len(BESIDE_ENGINES)
    assert result["alone"] == run("qwen3moe", "on")["alone"]
