"""Composing over verl's configurations, wherever verl is installed."""

import shutil

import pytest
import yaml

from verl_patches.features.settings import overlay_defaults
from verl_patches.trainer import main_ppo


@pytest.mark.parametrize("name", ["it's a 测试 dir", "a,b=c", "back\\slash", "{x} [y] #1"])
def test_verls_folder_may_have_any_name(name, tmp_path, monkeypatch):
    installed = main_ppo.verl_config_folder()
    moved = tmp_path / name / "config"
    shutil.copytree(installed, moved)
    overlaid = moved / "ppo_megatron_trainer.yaml"
    overlaid.write_text(overlaid.read_text().replace("cliprange_value: 0.5", "cliprange_value: 0.75"))
    monkeypatch.setattr(main_ppo, "verl_config_folder", lambda: moved)
    assert main_ppo.compose("rehearsal", []).critic.cliprange_value == 0.75


@pytest.mark.parametrize("group", ["measure", "dp_sync"])
def test_a_group_of_the_overlay_that_is_null_has_its_defaults(group, capsys):
    printed = []
    for words in ([], [f"actor_rollout_ref.overlay.{group}=null"]):
        assert main_ppo.main(["--print-config", "actor_rollout_ref.model.path=/weights", *words]) == 0
        printed.append(capsys.readouterr().out)
    nodes = [yaml.safe_load(each)["actor_rollout_ref"]["overlay"] for each in printed]
    assert nodes[1][group] == overlay_defaults()["actor_rollout_ref"]["overlay"][group]
    assert {**nodes[0], group: None} == {**nodes[1], group: None}
