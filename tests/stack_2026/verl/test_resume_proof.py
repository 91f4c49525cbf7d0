"""A job that is killed in a save and resumed is compared with an unbroken run, and each difference is found."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from post_training.processes.command import SignalFlag
from rehearsal.resume_proof.runs import ProofError
from rehearsal.stack_2026 import resume_proof
from rehearsal.stack_2026.resume_proof import REACHED_NAME, Proof, compare
from rehearsal.stack_2026.saved_state import digests_of
from tests.shared_templates import SHARED, started_with
from tests.stack_2026 import shared_training
from tests.stack_2026.verl.test_jobs import CLUSTER, ONE_CARD

KL, LARGEST = "rollout_corr/kl", "training/rollout_probs_diff_max"
OPTIMIZER = "actor/optim_world_size_1_rank_0.pt"


def write_run(folder: Path, shift: float = 0.0) -> Path:
    """Write the files of two steps of a run; `shift` moves the last step's weights."""
    metrics = {"actor/lr": 0.1, KL: 2e-4, LARGEST: 2e-3}
    lines = [{"step": step, "metrics": metrics | {"timing_s/step": step + shift}} for step in (1, 2)]
    for step in (1, 2):
        actor = folder / "checkpoints" / f"global_step_{step}" / "actor"
        (actor / "dist_ckpt").mkdir(parents=True)
        save_file({"weight": torch.ones(3) * step + (step == 2) * shift}, actor / "model.safetensors")
        torch.save(
            {
                "state": {0: {"exp_avg": torch.arange(3.0) * step}},
                "steps": (3, [1, 2], None),
                "rng": {"cpu": torch.rand(2)},
            },
            folder / "state",
        )
        (folder / "state").rename(actor / Path(OPTIMIZER).name)
        (actor / "dist_ckpt" / "__0_0.distcp").write_bytes(b"tensors" * step)
        (actor / "dist_ckpt" / ".metadata").write_text(str(folder))  # random names, new at each save
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path) -> tuple[Path, Path]:
    return write_run(tmp_path / "unbroken"), write_run(tmp_path / "killed")


def _other_metric(run: Path) -> None:
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().replace('"actor/lr": 0.1', '"actor/lr": 0.1000000001', 1))


def _other_bytes(run: Path) -> None:
    (run / "checkpoints/global_step_2/actor/dist_ckpt/__0_0.distcp").write_bytes(b"other")


def _other_schedule(run: Path) -> None:
    file = run / "checkpoints/global_step_2" / OPTIMIZER
    torch.save(torch.load(file) | {"steps": (3, [1, 3], None)}, file)


def _other_average(run: Path) -> None:
    torch.save(
        {"state": {0: {"exp_avg": torch.arange(3.0)}}, "steps": (3, [1, 2], None), "rng": {"cpu": torch.rand(2)}},
        run / "state",
    )
    (run / "state").rename(run / "checkpoints/global_step_2" / OPTIMIZER)


def _lost_file(run: Path) -> None:
    (run / "checkpoints/global_step_2/actor/model.safetensors").unlink()


def _not_trained(run: Path) -> None:
    """Replace both runs' last step by a copy of the step before it."""
    for each in (run, run.with_name("unbroken")):
        shutil.rmtree(each / "checkpoints" / "global_step_2")
        shutil.copytree(each / "checkpoints" / "global_step_1", each / "checkpoints" / "global_step_2")


def test_equal_runs_are_equal(runs):
    found = compare(*runs)
    assert (found.steps, found.metrics, found.differing) == (2, 6, ()) and len(digests_of(step_of(runs[0]))) == 3


def step_of(run: Path) -> Path:
    return run / "checkpoints" / "global_step_2"


@pytest.mark.parametrize(
    ("metric", "value", "agrees"),
    [
        (KL, "3e-4", True), (KL, "3e-3", False), (KL, "NaN", False),
        (LARGEST, "4e-3", True), (LARGEST, "3e-2", False), (LARGEST, "NaN", False),
    ],
)  # fmt: skip
def test_rounding_of_the_rollout_is_no_difference(runs, metric, value, agrees):
    file, written = runs[1] / "metrics.jsonl", {KL: 0.0002, LARGEST: 0.002}[metric]
    file.write_text(file.read_text().replace(f'"{metric}": {written}', f'"{metric}": {value}', 1))
    assert compare(*runs).differing == (() if agrees else (f"step 1: {metric}",))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_other_metric, "step 1: actor/lr"),
        (_other_bytes, "actor/dist_ckpt/__0_0.distcp of step 2"),
        (_other_average, f"{OPTIMIZER} of step 2"),
        (_other_schedule, f"{OPTIMIZER} of step 2"),
        (_lost_file, "actor/model.safetensors of step 2"),
        (_not_trained, "the last step changed nothing, so a resume proves nothing"),
    ],
)
def test_difference_is_found(runs, change, said):
    change(runs[1])
    assert compare(*runs).differing == (said,)


class Rehearsals:
    """A stand-in for the commands, which write a run; the killed one reports that it is paused in its save."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **ends: int) -> None:
        self.ends, self.commands = {"unbroken": 0, "killed": 1, "resumed": 0} | ends, {}
        self.held = True
        monkeypatch.setattr(resume_proof, "run_to_the_end", self.run)
        monkeypatch.setattr(resume_proof, "_kill_at", lambda reached: None)

    def run(self, command: list[str], *arguments: object, check: Callable[[], None]) -> int:
        log = Path(str(arguments[2]))
        log.write_text("the last line\n")
        self.commands[log.stem] = command
        if log.stem != "resumed":
            write_run(log.with_suffix(""))
        if log.stem == "killed" and self.held:
            (log.with_suffix("") / "checkpoints" / REACHED_NAME).touch()
        check()
        return self.ends[log.stem]


def test_proof_resumes_what_it_killed_and_compares(monkeypatch, tmp_path):
    rehearsals = Rehearsals(monkeypatch)
    assert Proof(ONE_CARD, ("data.seed=7",), tmp_path).carry_out(SignalFlag()).differing == ()
    unbroken, killed, resumed = (rehearsals.commands[name] for name in ("unbroken", "killed", "resumed"))
    assert unbroken[-2:] == ["data.seed=7", "trainer.save_freq=1"]
    assert killed[-1].endswith("held_save.HeldSave") and killed[-3:-1] == unbroken[-2:]
    assert resumed[3:5] == ["--resume", str(tmp_path / "killed")] and resumed[-1].endswith("CompleteCheckpoint")


@pytest.mark.parametrize(
    ("ends", "held", "said"),
    [
        ({"unbroken": 1}, True, "the unbroken run ended with 1; the last line"),
        ({"resumed": 1}, True, "the resumed run ended with 1"),
        ({"killed": 0}, True, "the run to be killed ended with 0, and was not killed in its save"),
        ({}, False, "the run to be killed ended with 1, and was not killed in its save"),
    ],
)
def test_run_that_fails_ends_the_proof(monkeypatch, tmp_path, ends, held, said):
    rehearsals = Rehearsals(monkeypatch, **ends)
    rehearsals.held = held
    with pytest.raises(ProofError, match=said):
        Proof(ONE_CARD, (), tmp_path).carry_out(SignalFlag())


run_alone = Proof._run


def run_of_tests(self: Proof, name: str, command: list[str], *arguments: Any) -> int:
    """Run a command of a proof with the tests' imports and warm start. The killed run has processes of its own."""
    environment = started_with(os.environ)
    if name == "killed":
        environment.pop(SHARED, None)
    with mock.patch.dict(os.environ, environment, clear=True):
        return run_alone(self, name, [command[0], "-m", shared_training.__name__, *command[3:]], *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("job", [ONE_CARD, *(pytest.param(job, marks=pytest.mark.exhaustive) for job in CLUSTER)])
def test_job_resumes_bit_for_bit(tmp_path, capsys, monkeypatch, job):
    """The 256-die job has its optimizer on the host."""
    monkeypatch.setattr(Proof, "_run", run_of_tests)
    assert resume_proof.main(["--job", job, "--output", str(tmp_path)]) == 0, capsys.readouterr()
    assert "resumed after step 1" in capsys.readouterr().out
    assert "Continuing after step 1" in (tmp_path / "resumed.log").read_text()
    assert "complete.json, which is written last, so its save was interrupted" in (tmp_path / "resumed.log").read_text()
