"""scripts/enable_patches.py in a separate environment: verl's own command, and any program that imports verl."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts.cluster_files import ROOT, load_script
from tests.scripts.guides import QUICK_START, Environment

ENABLE = ROOT / "scripts" / "enable_patches.py"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("enabled"))
    assert made.run("python3", ENABLE, "--status").returncode == 1
    enabled = made.run("python3", ENABLE)
    assert enabled.returncode == 0 and str(ROOT) in enabled.stdout, enabled.stderr
    assert made.run("python3", ENABLE, "--status").returncode == 0
    return made


def test_verls_own_command_is_ours(environment):
    """The published line, with `$@` at its end as in the guide, is composed and checked unedited."""
    line, model = QUICK_START.replace("set -x", ""), "actor_rollout_ref.model.path=/weights"
    printed = environment.run("bash", "-c", line, "bash", "--cfg", "job")
    assert printed.returncode == 0, printed.stderr
    assert "overlay:" in printed.stdout and re.search(r"^ *device: npu$", printed.stdout, re.MULTILINE)
    rejected = environment.run("bash", "-c", line, "bash", model, "trainer.n_gpus_per_node=3")
    assert rejected.returncode == 2 and len(rejected.stderr.splitlines()) == 1, rejected.stderr
    assert rejected.stderr.startswith(
        "error: 3 dies do not divide into whole rollout instances of actor_rollout_ref.rollout"
    )


def test_program_that_imports_verl_has_the_patches(environment):
    program = "import verl, overlay; print(overlay.report().pending); overlay.assert_effective()"
    ended = environment.run("python3", "-c", program)
    assert ended.returncode == 0, ended.stderr
    for target in ("verl.workers.fsdp_workers:ActorRolloutRefWorker.__init__", "verl.workers.megatron_workers:"):
        assert target in ended.stdout


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_remove_leaves_verls_own_command(tmp_path):
    made = Environment(tmp_path)
    before = files_below(made.site)
    assert made.run("python3", ENABLE).returncode == 0
    assert made.run("python3", "-c", "").returncode == 0 and len(files_below(made.site)) == len(before) + 3
    removed = made.run("python3", ENABLE, "--remove")
    assert removed.returncode == 0 and "removed from" in removed.stdout and files_below(made.site) == before
    assert "nothing to remove" in made.run("python3", ENABLE, "--remove").stdout
    assert made.run("python3", ENABLE, "--status").returncode == 1


def test_folder_that_cannot_be_written_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/proc/self/site-packages")
    assert load_script("scripts/enable_patches.py").main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: /proc/self/site-packages cannot be written (") and len(said.splitlines()) == 1
