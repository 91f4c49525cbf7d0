"""The rehearsal on both engines with the same noise: what it samples is the same, and what it computes agrees.

On `cann` every step is the published torch_npu's: rollout with vLLM-Ascend, reference and update with Megatron-core,
reshard and offload.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from post_training.report import read_records
from tests.npu_emulator.cann.engine_process import ROOT

NOISE = Path(__file__).with_name("host_noise")
STEPS = 3
# What follows from the tokens alone, and must be the same number.
OF_TOKENS = (
    "global_seqlen/",
    "response_length/",
    "prompt_length/",
    "critic/score/",
    "critic/rewards/",
    "reshard/weights",
)
# Times, and bytes of two allocators.
OF_THE_MACHINE = ("timing", "perf/", "memory/", "reshard/seconds")
# Itself the rounding of float32 in two models: at most this, on either engine.
ROUNDING = {"training/rollout_logprob_diff": 1e-5}
RELATIVE = 1e-5


def differences(one: dict, other: dict) -> list[str]:
    """Metrics of a step that differ by more than float32 sums of another order do, and those that only one has."""
    found = [f"{name} is in one run only" for name in sorted(one.keys() ^ other.keys())]
    for name in sorted(one.keys() & other.keys()):
        if name.startswith(OF_THE_MACHINE) or "time" in name or not isinstance(one[name], int | float):
            continue
        room = 0.0 if name.startswith(OF_TOKENS) else RELATIVE * abs(other[name])
        room += sum(bound for prefix, bound in ROUNDING.items() if name.startswith(prefix))
        if not abs(one[name] - other[name]) <= room:
            found.append(f"{name}: {one[name]} and {other[name]}")
    return found


def test_a_metric_that_differs_and_one_that_is_missing_are_found():
    metrics = {"critic/score/mean": 0.5, "actor/grad_norm": 1.0, "perf/mfu": 1.0}
    assert differences(metrics, metrics | {"perf/mfu": 2.0, "actor/grad_norm": 1.0000001}) == []
    assert len(differences(metrics, metrics | {"critic/score/mean": 0.5000001})) == 1
    assert len(differences(metrics, metrics | {"actor/grad_norm": 1.0001})) == 1
    assert len(differences(metrics, metrics | {"actor/kl_loss": float("nan")})) == 1


def rehearse(engine: str, folder: Path) -> list:
    command = [sys.executable, "-m", "rehearsal", "--engine", engine, "--steps", str(STEPS), "--output", folder]
    environment = {name: value for name, value in os.environ.items() if name != "NPU_EMULATOR_ENGINE"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{NOISE}"
    ended = subprocess.run(
        [*command, "--", "actor_rollout_ref.overlay.precision=float32"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return read_records(folder / "metrics.jsonl")


@pytest.mark.exhaustive
def test_both_engines_sample_the_same_and_compute_what_agrees(tmp_path):
    stand_in, cann = (rehearse(engine, tmp_path / engine) for engine in ("stand-in", "cann"))
    assert [record.step for record in cann] == [record.step for record in stand_in] == list(range(1, STEPS + 1))
    for one, other in zip(stand_in, cann, strict=True):
        assert differences(one.metrics, other.metrics) == [], one.step
        assert other.metrics["reshard/weights_exact"] == 1
