"""Thirty kinds of secrets, planted in variables, settings and output, never appear in a run's files or output."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rehearsal.kept_options import MaskedOverride
from rehearsal.plan import Options
from tests.post_training.masking.planted import KEY_BLOCK, NAMES, VALUE, texts
from verl_patches.features.measure.run_files import RunFiles
from verl_patches.features.training_checkpoint.circumstances import circumstances
from verl_patches.trainer import main_ppo

ROOT = Path(__file__).resolve().parents[2]
FROM_ENVIRONMENT = "hunter2-of-the-environment"
VARIABLES = {name: f"{FROM_ENVIRONMENT}-{name}" for name in NAMES if name.isidentifier()}
PROJECT = "trainer.project_name='${oc.env:WANDB_API_KEY}'"
TOKEN = "+trainer.wandb_token=" + VALUE


def leaks(*said: str) -> list[str]:
    secrets = {VALUE, FROM_ENVIRONMENT, *(secret for _, secret in texts())}
    return sorted(secret for secret in secrets for each in said if secret in each)


@pytest.fixture
def variables(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def test_configuration_of_run_masked(variables, tmp_path, capsys):
    given = [PROJECT, TOKEN, "actor_rollout_ref.model.path=/m"]
    given.append(f"actor_rollout_ref.overlay.measure.output_dir={tmp_path}")
    config = main_ppo.compose("rehearsal", [*given, "+custom_reward_function.reward_kwargs.password=[a," + VALUE + "]"])
    main_ppo._write_resolved(config)
    kept = (tmp_path / "config.yaml").read_text()
    assert not leaks(kept, json.dumps(circumstances(config))) and "project_name: '***'" in kept
    assert OmegaConf.load(tmp_path / "config.yaml").trainer.wandb_token == "***"
    code = main_ppo.main(["--print-config", *given])
    said = capsys.readouterr()
    assert not leaks(said.out, said.err) and (code == 2 or "project_name: '***'" in said.out)


def test_rejection_of_secret_override_masked(variables, capsys):
    assert main_ppo.main(["trainer.no_such_key=${oc.env:WANDB_API_KEY}", f"trainer.password={VALUE}"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and not leaks(said.out, said.err)


def test_records_of_run_masked(variables, tmp_path):
    files = RunFiles(str(tmp_path))
    for text, _ in texts():
        files.note("ended", status="failed", message=text)
        files.fault("reward_raised", text, 1, answer=os.environ["WANDB_API_KEY"])
        files.alert({"step": 1, "alert": "a", "message": text})
    names = ("events.jsonl", "faults.jsonl", "alerts.jsonl")
    assert not leaks(*((tmp_path / name).read_text() for name in names))


def test_choices_of_rehearsal_keep_no_secret(variables, tmp_path):
    override = "+trainer.wandb_token=" + VALUE
    Options(overrides=(override, "data.seed=7", PROJECT)).write(tmp_path / "rehearsal.json")
    assert not leaks((tmp_path / "rehearsal.json").read_text())
    with pytest.raises(MaskedOverride, match=r"Set it again after --, as -- \+trainer.wandb_token=VALUE"):
        Options.of_run(tmp_path, ())
    assert Options.of_run(tmp_path, (override,)).overrides == ("data.seed=7", PROJECT, override)


def test_dry_run_of_rehearsal_masked(variables):
    command = [
        sys.executable,
        "-m",
        "rehearsal",
        "--dry-run",
        "--",
        PROJECT,
        f"+trainer.wandb_proxy=http://me:{VALUE}@host:1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "http://***@host:1" in done.stdout, done.stderr
    assert not leaks(done.stdout, done.stderr)


def test_supervised_output_and_bundle_masked(variables, tmp_path):
    said = tmp_path / "said"
    said.write_text("".join(f"{text}\n" for text, _ in texts()))
    program = f'cat {said}; env; echo "project $WANDB_API_KEY" >&2; exit 1'
    command = [sys.executable, ROOT / "scripts/supervise.py", "--output", tmp_path / "out", "--", "bash", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **VARIABLES})
    assert done.returncode == 1 and not leaks(done.stdout, done.stderr)
    (bundle,) = (tmp_path / "out").glob("failure-*.tar.gz")
    assert bundle.stat().st_mode & 0o777 == 0o600
    with tarfile.open(bundle) as archive:
        members = {Path(each.name).name: archive.extractfile(each).read().decode() for each in archive}
        assert {each.mode for each in archive} == {0o600}
    assert {"start_1.log", "supervision.jsonl", "versions.txt"} <= set(members)
    kept = [file for file in (tmp_path / "out").iterdir() if file != bundle]
    assert not leaks(*members.values(), *(file.read_text() for file in kept))
    assert "project ***" in members["start_1.log"] and KEY_BLOCK[:20] not in members["start_1.log"]
    assert (tmp_path / "out" / "start_1.log").stat().st_mode & 0o777 == 0o600
