"""A run of the stack 2026 continues from a checkpoint of the stack 2025, and computes what transformers does."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rehearsal.environment import environment_of
from rehearsal.plan import ROOT
from rehearsal.stack_2026.plan import CHANGES
from tests.stack_2026.rehearsals import command
from tests.stack_2026.verl.continued_reference import Reference
from verl_plugin.step_record.folder import read_record
from verl_plugin.trainer_modes import MODE_KEY, RECORDED

PYTHON = ROOT / ".venv" / "bin" / "python"
"""The interpreter of the stack 2025."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="the stack 2025 is not set up: bash scripts/test.sh does it"),
]
SAVED = 1
TOLERANCE, TOKEN_TOLERANCE = 1e-6, 2e-5
PRECISION = "actor_rollout_ref.overlay.precision"
# transformers chooses its own experts, as a run without routing replay does.
OWN_EXPERTS = ("actor_rollout_ref.rollout.enable_rollout_routing_replay=false",) + tuple(
    f"actor_rollout_ref.{part}.megatron.router_replay.mode=disabled" for part in ("actor", "ref")
)
# With fewer than 256 experts the rollout of 2025 scores groups of experts differently than training does, and its
# float32 run would fail for the difference of log-probs. In test_resume.py FSDP2's engine continues from such a
# checkpoint.
RUNS = [
    pytest.param(("qwen3_moe", "fsdp2", 1, "float32"), marks=pytest.mark.exhaustive, id="qwen3_moe"),
    pytest.param(("deepseek_v3", "megatron", 2, "bfloat16"), id="deepseek_v3"),
]


# The stack 2025 makes the model: transformers 4 cannot read a tokenizer that transformers 5 wrote. The short warm start
# makes some answers correct.
MAKE_MODEL = """
import json, sys
from pathlib import Path
from rehearsal.plan import DEFAULT_TRAIN_DATA
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from rehearsal.tiny_model.warm_start import WarmStart

family, folder, changes = sys.argv[1:]
asked = CheckpointRequest(
    DEFAULT_TRAIN_DATA, 0, warm_start=WarmStart(steps=80), model_type=family,
    changes=tuple(json.loads(changes).items()), published_end=True,
)
make_checkpoint(asked, Path(folder), lambda *_: None)
"""


@dataclass(frozen=True)
class Continued:
    """The model's folder, the checkpoint of 2025, and the run of 2026 that continued from it for one step."""

    backend: str
    model: Path
    checkpoint: Path
    run: Path
    folder: Path

    @property
    def metrics(self) -> dict[str, float]:
        (line,) = (self.run / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == SAVED + 1
        return json.loads(line)["metrics"]


def run_2025(*arguments: str) -> None:
    """Run Python of the stack 2025 in its own environment."""
    own = {name: value for name, value in os.environ.items() if name not in environment_of("2026")}
    own |= environment_of("2025") | {"PATH": f"{PYTHON.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for name in ("NPU_EMULATOR_STRICT", "NPU_EMULATOR_NODE", "CUDA_DEVICE_MAX_CONNECTIONS"):  # of the tests
        own.pop(name, None)
    ended = subprocess.run([str(PYTHON), *arguments], env=own, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


@pytest.fixture(scope="module", params=RUNS)
def continued(request, tmp_path_factory) -> Continued:
    family, backend, dies, precision = request.param
    folder = tmp_path_factory.mktemp(family)
    model = folder / "model"
    run_2025("-c", MAKE_MODEL, family, str(model), json.dumps(CHANGES.get(family, {})))
    given = ("--", f"actor_rollout_ref.model.path={model}", "trainer.save_freq=1")
    of_2025 = ("--model", family, "--steps", str(SAVED), *given, f"{PRECISION}={precision}")
    run_2025("-m", "rehearsal", "--output", str(folder / "2025"), *of_2025)
    checkpoint, run = folder / "2025" / "checkpoints" / f"global_step_{SAVED}", folder / "2026"
    own = ("--model", family, "--backend", backend, "--dies", str(dies), "--steps", str(SAVED + 1))
    resumed = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    recorded = (f"+trainer.record_steps=[{SAVED + 1}]", f"{MODE_KEY}={RECORDED}")
    experts = OWN_EXPERTS if backend == "megatron" else ()
    ended = command("--output", str(run), *own, *given, *resumed, *recorded, *experts)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return Continued(backend, model, checkpoint, run, folder)


def test_first_step_is_that_of_transformers(continued, tmp_path):
    record, weights = read_record(continued.run / "checkpoints" / "records" / f"step_{SAVED + 1}")
    assert weights is not None and (weights / "manifest.json").is_file()  # the 2025 stack's
    found = Reference(continued.model, continued.checkpoint, tmp_path).step(record)
    assert apart(found.log_probs, record.columns["old_log_probs"].rows) < TOKEN_TOLERANCE
    assert apart(found.ref_log_probs, record.columns["ref_log_prob"].rows) < TOKEN_TOLERANCE
    metrics = continued.metrics
    assert metrics["actor/loss"] == pytest.approx(found.loss, abs=TOLERANCE)
    assert metrics["actor/kl_loss"] == pytest.approx(found.kl, abs=TOLERANCE) and found.kl > 100 * TOLERANCE
    assert metrics["actor/grad_norm"] == pytest.approx(found.norm, rel=1e-4) and found.norm > 0.01


def test_model_without_the_checkpoint_is_another_one(continued, tmp_path):
    record, _ = read_record(continued.run / "checkpoints" / "records" / f"step_{SAVED + 1}")
    found = Reference(continued.model, None, tmp_path).step(record)
    assert apart(found.log_probs, record.columns["old_log_probs"].rows) > 100 * TOKEN_TOLERANCE


def test_update_goes_on_with_the_averages(continued, tmp_path):
    """Compare FSDP2's weights, which have transformers' names; test_resume.py compares Megatron-core's."""
    if continued.backend != "fsdp2":
        return
    record, _ = read_record(continued.run / "checkpoints" / "records" / f"step_{SAVED + 1}")
    saved = continued.run / "checkpoints" / f"global_step_{SAVED + 1}" / "actor" / "model_world_size_1_rank_0.pt"
    states = torch.load(saved, map_location="cpu", weights_only=False)
    trained = {name: getattr(value, "to_local", lambda value=value: value)() for name, value in states.items()}
    differences = {}
    for averages in (True, False):
        reference = Reference(continued.model, continued.checkpoint, tmp_path / str(averages), averages)
        reference.step(record)
        rows = dict(reference.model.named_parameters())
        assert rows.keys() <= trained.keys()
        differences[averages] = max((rows[name].detach() - trained[name]).abs().max().item() for name in rows)
    assert differences[True] < TOLERANCE < 50 * TOLERANCE < differences[False], differences


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max((a.flatten() - b.flatten()).abs().max().item() for a, b in zip(one, other, strict=True))
