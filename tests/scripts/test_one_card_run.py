"""One emulated card from end to end: training with validation, saving, resuming, export and evaluation; its memory
compared with the plan, and all of its metrics in every tracker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from scripts import plan
from tests.scripts.test_one_node import ONE_CARD, ROOT, emulate
from tests.verl_patches.features.tracking.test_clients import JOB, WANDBS_OWN, needs_clients, python, read_by
from verl_patches.features.tracking.backends import backend

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(2400)]
LAST = 3
VALIDATED = "val-core/arithmetic/reward/mean@1"


def script(name: str, *arguments: object) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / name, *map(str, arguments)],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> SimpleNamespace:
    """Run two steps and resume to the third. Return the run's folder, its metrics by step, and the number of lines."""
    folder = tmp_path_factory.mktemp("one card") / "run"
    frequencies = ("trainer.save_freq=1", "trainer.test_freq=1")
    ended, _ = emulate(ONE_CARD, folder, "--steps", str(LAST - 1), "--", *frequencies)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ended, _ = emulate(ONE_CARD, folder, "--resume", "auto", "--steps", str(LAST))
    assert ended.returncode == 0 and f"Continuing after step {LAST - 1}" in ended.stdout, ended.stdout + ended.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return SimpleNamespace(folder=folder, logged={line["step"]: line["metrics"] for line in lines}, lines=len(lines))


def test_every_step_is_validated_and_saved_and_no_step_is_there_twice(trained):
    assert sorted(trained.logged) == list(range(LAST + 1)) and trained.lines == LAST + 1
    assert all(VALIDATED in metrics for metrics in trained.logged.values())
    saved = sorted(folder.name for folder in (trained.folder / "checkpoints").glob("global_step_*"))
    assert saved == [f"global_step_{step}" for step in (LAST - 1, LAST)]  # two are kept


def test_what_it_learned_is_exported_and_evaluated_beside_what_it_began_with(trained, tmp_path):
    last, before = trained.folder / "checkpoints" / f"global_step_{LAST}", _resolved(trained.folder, "model", "path")
    script("export_hf.py", last, tmp_path / "model")
    models = ["--model", f"before={before}", "--model", f"after={tmp_path}/model", "--model", f"checkpoint={last}"]
    data = ROOT / "data" / "arithmetic" / "test.jsonl"
    script(
        "evaluate.py", "--emulate", *models, "--data", data, "--n", 2, "--max-tokens", 16, "--output", tmp_path / "e"
    )
    found = json.loads((tmp_path / "e" / "evaluation.json").read_text())
    answers = [each["answers"] for each in found["questions"]]
    assert len(answers) > 10 and all(set(each) == {"before", "after", "checkpoint"} for each in answers)
    exported, checkpoint = ([each[name]["greedy"]["text"] for each in answers] for name in ("after", "checkpoint"))
    assert exported == checkpoint
    weights = [weights_of(Path(folder)) for folder in (before, tmp_path / "model")]
    assert weights[0].keys() == weights[1].keys()
    assert not all(torch.equal(weights[0][name].float(), weights[1][name].float()) for name in weights[0])
    assert (tmp_path / "e" / "evaluation.html").exists()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _resolved(folder: Path, *keys: str) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.select(OmegaConf.load(folder / "config.yaml"), ".".join(("actor_rollout_ref", *keys)))


def planned(capsys, trained, *more: str) -> tuple[int, dict]:
    model = Path(_resolved(trained.folder, "model", "path")) / "config.json"
    arguments = ["--config-name", "qwen2_5_1_5b_math_one_card", "--model", str(model), "--emulated", "--json"]
    code = plan.main([*arguments, "+scale=emulated_qwen2_5", *more])
    return code, json.loads(capsys.readouterr().out)


def test_the_die_needs_what_the_plan_says_and_five_percent_less_rejected(capsys, trained):
    peaks = json.loads((trained.folder / "memory" / "0.json").read_text())["peak_bytes"]
    _, found = planned(capsys, trained, "--die-memory", "1GiB")
    most = max(found["phases"].values())
    assert abs(most / max(peaks.values()) - 1) < 0.1, (peaks, found["phases"])
    for size, code in ((most, 0), (most * 95 // 100, 1)):
        assert planned(capsys, trained, "--die-memory", str(size))[0] == code
    print({phase: size / peaks[phase] for phase, size in found["phases"].items()})


def logged_by(name: str, trained: SimpleNamespace) -> dict[int, dict[str, float]]:
    """Return each step's metrics from metrics.jsonl, with the names and values that the tracker accepts."""
    return {step: backend(name).values(metrics) for step, metrics in trained.logged.items()}


def test_tensorboard_has_every_metric_of_every_step(trained):
    """These are the events that the run itself wrote, before and after the resume."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for each in events.Scalars(name):
            assert name not in found.setdefault(each.step, {}), (name, each.step)
            found[each.step][name] = each.value
    expected = logged_by("tensorboard", trained)
    assert {step: set(values) for step, values in found.items()} == {step: set(expected[step]) for step in expected}
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-6), step  # float32
    del found[LAST]["critic/score/mean"]  # the control
    assert found.keys() == expected.keys() and set(found[LAST]) != set(expected[LAST])


@pytest.fixture(scope="module")
def replayed(trained, tmp_path_factory) -> Path:
    """Replay the run line by line to the clients whose packages are not in the environment."""
    folder = tmp_path_factory.mktemp("replayed")
    (folder / "run").mkdir()
    metrics, clients = trained.folder / "metrics.jsonl", ("mlflow", "wandb", "swanlab")
    python(JOB.with_name("replay.py"), folder / "run", metrics, *clients, tmp_path=folder)
    return folder


def histories(name: str, folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics by step from the output of `readers.py`."""
    read, found = read_by(name, folder / "run", folder), {}
    if name == "mlflow":
        rows = [(step, metric, value) for metric, values in read[3].items() for step, value in values]
    elif name == "swanlab":
        rows = [(each[2], each[1], each[3]) for each in read if each[0] == "scalar"]
    else:
        steps = [values for kind, values in read if kind == "history"]
        rows = [(each["_step"], name, each[name]) for each in steps for name in set(each) - WANDBS_OWN]
    for step, metric, value in rows:
        assert metric not in found.setdefault(step, {}), (metric, step)
        found[step][metric] = value
    return found


@needs_clients
@pytest.mark.parametrize("name", ["mlflow", "wandb", "swanlab"])
def test_a_client_reads_back_every_metric_of_every_step(trained, replayed, name):
    found, expected = histories(name, replayed), logged_by(name, trained)
    if name == "mlflow":  # verl's own replacement of the sign
        expected = {
            step: {key.replace("@", "_at_"): value for key, value in expected[step].items()} for step in expected
        }
    if name == "swanlab":  # it also records the machine
        found = {
            step: {key: row[key] for key in row if not key.startswith("__swanlab__")} for step, row in found.items()
        }
    print(name, {step: len(values) for step, values in found.items()})
    assert {step: set(values) for step, values in found.items()} == {step: set(expected[step]) for step in expected}
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-6), step
