"""The launchers of Qwen2.5-VL, and every command of their guide in both languages."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from scripts import check_data, export_hf, json_to_parquet, verify_ckpt

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "docs" / f"qwen2_5_vl{language}.md" for language in ("", ".zh")]
PARSERS = {
    "scripts/check_data.py": check_data.parse_arguments,
    "scripts/export_hf.py": export_hf.parse_arguments,
    "scripts/json_to_parquet.py": json_to_parquet.parse_arguments,
    "scripts/verify_ckpt.py": verify_ckpt.parse_arguments,
}


def commands(guide):
    lines = re.findall(r"^ {4,}((?:bash|python|hf|modelscope) .*)$", guide.read_text(), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_both_guides_have_the_same_commands():
    assert commands(GUIDES[0]) == commands(GUIDES[1])
    assert {each[1] for each in commands(GUIDES[0])} >= {
        "scripts/train_qwen2_5_vl_3b_geo3k_one_card.sh", "scripts/train_qwen2_5_vl_7b_geo3k.sh", "scripts/plan.py",
    }  # fmt: skip


@pytest.mark.parametrize("command", [each for each in commands(GUIDES[0]) if each[1] in PARSERS], ids=" ".join)
def test_options_of_a_tool_are_known(command):
    PARSERS[command[1]](command[2:])


@pytest.mark.parametrize(
    "command", [each for each in commands(GUIDES[0]) if "--data" in each and "train_qwen" in each[1]], ids=" ".join
)
def test_launcher_plans_its_job(command, tmp_path):
    """Empty stand-ins replace the reader's model and data."""
    for size in ("3B", "7B"):
        (tmp_path / f"Qwen2.5-VL-{size}-Instruct").mkdir()
        (tmp_path / f"Qwen2.5-VL-{size}-Instruct" / "config.json").write_text("{}")
    (tmp_path / "geometry3k" / "data").mkdir(parents=True)
    for name in ("train", "test"):
        (tmp_path / "geometry3k" / "data" / f"{name}-00000-of-00001.parquet").touch()
    words = [re.sub("^/data/", f"{tmp_path}/", word) for word in command if word != "--dry-run"]
    words.insert(2, "--dry-run")
    ended = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    name = Path(command[1]).stem.removeprefix("train_")
    assert f"run python3 -m verl_patches.trainer.main_ppo --config-name {name} " in ended.stdout
    assert "scripts/json_to_parquet.py" in ended.stdout


@pytest.mark.parametrize("name", ["3b_geo3k_one_card", "7b_geo3k"])
def test_help_names_the_launcher(name):
    launcher = ROOT / "scripts" / f"train_qwen2_5_vl_{name}.sh"
    ended = subprocess.run(["bash", launcher, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0 and name in ended.stdout and "Geometry3K" in ended.stdout
