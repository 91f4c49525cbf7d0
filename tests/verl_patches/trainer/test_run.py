"""The entry point with Ray, four dies and verl's own loop, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from scripts.rehearsal.plan import ENVIRONMENT_FILE, read_environment

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
STEPS = 3
MARKER = "ENTRY_POINT_TEST"


def command(inputs, output, *overrides):
    """The run's command line and environment, and the mark that all its processes carry."""
    checkpoint, data = inputs
    arguments = [
        f"actor_rollout_ref.model.path={checkpoint}",
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.overlay.measure.output_dir={output}",
        "data.train_batch_size=8",
        f"trainer.total_training_steps={STEPS}",
        *overrides,
    ]
    mark = uuid.uuid4().hex
    environment = os.environ | read_environment(ENVIRONMENT_FILE)
    environment |= {"PYTHONPATH": str(ROOT), "NPU_EMULATOR_DEVICES": "4", "NPU_EMULATOR_CAPACITY_MB": "1024"}
    environment[MARKER] = mark
    return [sys.executable, "-m", "verl_patches.trainer.main_ppo", *arguments], environment, mark


def processes_with(mark) -> list[str]:
    """Command lines of the living processes whose environment holds the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (OSError, PermissionError):
            continue
    return found


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_float32_run_is_exact_at_every_step_and_leaves_nothing_running(inputs, tmp_path):
    line, environment, mark = command(
        inputs,
        tmp_path,
        "actor_rollout_ref.overlay.precision=float32",
        "actor_rollout_ref.overlay.measure.verify_weights=true",
    )
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert not processes_with(mark)
    steps = records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 2, 3]
    for metrics in (record["metrics"] for record in steps):
        assert metrics["reshard/weights_exact"] == 1
        assert 0 < metrics["training/rollout_logprob_diff_max"] < 1e-3
        assert metrics["overlay/patches_ineffective"] == 0
        assert metrics["actor/nonfinite_steps"] == 0
        assert not any(name.startswith(("actor/entropy_loss", "training/rollout_probs_diff")) for name in metrics)
        assert metrics["memory/peak_bytes/update"] > 0 and metrics["timing_s/reshard"] > 0
    overlay = json.loads((tmp_path / "overlay.json").read_text())
    assert not overlay["problems"] and all(overlay["effective"].values())
    events = [record["event"] for record in records(tmp_path / "events.jsonl")]
    assert events == [
        "ray_ready",
        "data_ready",
        "reference_ready",
        "rollout_ready",
        "models_ready",
        "training_begins",
    ]
    assert (tmp_path / "config.yaml").exists() and list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_all_that_was_started(inputs, tmp_path, number, code):
    line, environment, mark = command(inputs, tmp_path)
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # Python leaves SIGINT ignored where it was when it started, as it is below some test harnesses.
    outputs["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(line, env=environment, cwd=tmp_path, **outputs) as process:
        for said in process.stdout:
            if "(TaskRunner" in said:
                break
        assert len(processes_with(mark)) > 2
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(60) == code
    assert not processes_with(mark)
