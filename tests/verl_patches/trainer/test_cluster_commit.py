"""The jobs also work with the cluster's commit of verl, of which only the differences are known here."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.verl_patches.trainer.cluster_commit import ABSENT_KEYS, ABSENT_MEMBERS
from verl_patches.trainer import main_ppo
from verl_patches.trainer.configuration_checks import check_configuration

ROOT = Path(__file__).resolve().parents[3]
JOBS = [path.stem for path in main_ppo.CONFIG_FOLDER.glob("*.yaml") if path.stem != "fsdp_on_npu"]


def remove(node: dict[str, Any], name: str, *below: str) -> None:
    """Remove a leaf, and the groups that are empty afterwards."""
    if below:
        remove(node[name], *below)
    if not (below and node[name]):
        del node[name]


@pytest.fixture
def configurations_of_the_cluster(tmp_path, monkeypatch) -> None:
    """verl's configuration files without the keys that the cluster's commit lacks."""
    folder = Path(shutil.copytree(main_ppo.verl_config_folder(), tmp_path / "config"))
    for file, absent in ABSENT_KEYS.items():
        config = yaml.safe_load((folder / file).read_text())
        for key in absent:
            remove(config, *key.split("."))
        (folder / file).write_text(yaml.safe_dump(config, sort_keys=False))
    monkeypatch.setattr(main_ppo, "verl_config_folder", lambda: folder)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_passes_the_checks_of_the_entry_point(job, configurations_of_the_cluster):
    check_configuration(main_ppo.compose(job, ["actor_rollout_ref.model.path=/weights"]))


def own_members(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a class reads from `self` without checking that they exist."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def test_no_patch_reads_a_member_that_the_commit_lacks():
    files = sorted((ROOT / "verl_patches").rglob("*.py"))
    found = {file: ABSENT_MEMBERS.intersection(own_members(ast.parse(file.read_text()))) for file in files}
    assert not {str(file.relative_to(ROOT)): names for file, names in found.items() if names}
    assert len(files) > 100
    wrong = "def init(self): return self.ref_in_actor or getattr(self, 'lora_kwargs', None)"
    assert ABSENT_MEMBERS.intersection(own_members(ast.parse(wrong))) == {"ref_in_actor"}, "control: one is noticed"
