"""Composing over verl's configurations, wherever verl lies."""

import shutil

import pytest

from verl_patches.trainer import main_ppo


@pytest.mark.parametrize("name", ["it's a 测试 dir", "a,b=c", "back\\slash", "{x} [y] #1"])
def test_verls_folder_may_have_any_name(name, tmp_path, monkeypatch):
    installed = main_ppo._verl_config_folder()
    moved = tmp_path / name / "config"
    shutil.copytree(installed, moved)
    overlaid = moved / "ppo_megatron_trainer.yaml"
    overlaid.write_text(overlaid.read_text().replace("cliprange_value: 0.5", "cliprange_value: 0.75"))
    monkeypatch.setattr(main_ppo, "_verl_config_folder", lambda: moved)
    assert main_ppo.compose("rehearsal", []).critic.cliprange_value == 0.75
