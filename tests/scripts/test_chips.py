"""A node's chips: family, memory and links of an Atlas A2 from npu-smi's output, checked against the cluster file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from post_training.chips import A2, A3, CARDS, family_of
from post_training.environment_files import read_environment
from post_training.plan.placement_text import parse_bytes
from scripts.health_checks import chips, node
from scripts.health_checks.npus import Row, link, read_chips
from tests.scripts.cluster_files import ROOT, load_script
from tests.scripts.test_npus import LINKS, Chip, sample

FILES = sorted((ROOT / "scripts" / "env").glob("a2_8_cards_*.env"))


def test_families_are_those_of_torch_npu():
    """torch_npu's own table numbers the chips of an Atlas A2 from 220 to 225; an Atlas A3's are in
    tests/npu_emulator/test_chip.py."""
    program = "import torch, torch_npu; print(torch_npu.npu.get_soc_version())"
    environment = {"NPU_EMULATOR_CHIP": "Ascend910B4-1", "PATH": "/usr/bin:/bin"}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True).stdout
    assert 220 <= int(said.split()[-1]) <= 225 and family_of("Ascend910B4-1") == A2


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *[(name, A2) for name in ("910B1", "910B2C", "910B4-1", "Ascend 910B4", "Ascend910B3")],
        *[(name, A3) for name in ("Ascend910", "Ascend910_9391")],
        *[(name, None) for name in ("", "Ascend", "310P3", "Ascend310P3", "910A", "910ProB", "Ascend950PR")],
    ],
)
def test_family_follows_from_every_form_of_a_name(name, family):
    assert family_of(name) == family


def test_table_of_npu_smi_has_name_health_and_memory():
    assert read_chips(sample("a2_info")) == [Row(0, 0, "910B1", "OK", 65536), Row(1, 0, "910B1", "OK", 65536)]
    assert [row.memory_mib for row in read_chips(sample("a3_info"))] == [65536] * 16
    assert {row.name for row in read_chips(sample("a3_info"))} == {"Ascend910"}
    assert {row.memory_mib for row in read_chips(sample("inference_card_info"))} == {0}, "it has no HBM"


@pytest.fixture
def smi(monkeypatch):
    """Return `examine(table, topology)`, which runs the check on this npu-smi output; findings are by subject."""

    def examine(table: str, topology: str = "", **settings: str) -> dict[str, str]:
        said = {("info",): table, ("info", "-t", "topo"): topology}
        monkeypatch.setattr(chips, "ask", lambda _, *words: said[words])
        found = chips.check_chips({"DIES_PER_NODE": "8"} | settings)
        return {each.what: f"{each.state} {each.detail}; {each.remedy}" for each in found}

    return examine


def test_an_atlas_a2_is_held_against_its_own_file(smi):
    (large,) = [read_environment(file) for file in FILES if "64" in file.name]
    found = smi(sample("a2_info"), sample("a2_topology"), **large)
    assert found["chip"] == "ok 2 x 910B1, Atlas A2; "
    assert found["memory of a die"] == "ok 65536 MB (DIE_MEMORY=61GiB); "
    assert found["links between cards"] == "ok HCCS between all 6 pairs; "


def test_wrong_chip_or_memory_is_named_with_its_remedy(smi):
    found = smi(sample("a2_info"), CHIP="A3", DIE_MEMORY="61GiB")
    assert found["chip"].startswith("BAD 2 x 910B1, Atlas A2; CHIP=A3 is invalid on this node. Set CHIP=A2")
    small = sample("a2_info").replace("65536", "32768").replace("910B1", "910B4")
    found = smi(small, CHIP="A2", DIE_MEMORY="61GiB")
    assert found["memory of a die"] == "BAD 32768 MB (DIE_MEMORY=61GiB); set DIE_MEMORY=29GiB, and plan the job again"
    assert smi(small, CHIP="A2", DIE_MEMORY="29GiB")["memory of a die"].startswith("ok")
    assert smi(sample("a3_info"), CHIP="A3", DIE_MEMORY="61GiB").keys() == {"chip", "memory of a die"}
    assert smi(sample("a3_info"), CHIP="A2")["chip"].startswith("BAD 16 x Ascend910, Atlas A3; CHIP=A2 is invalid")


def test_two_kinds_of_cards_and_unknown_ones_are_told_apart(smi):
    mixed = sample("a2_info").replace("910B1", "Ascend910", 1)
    assert smi(mixed, CHIP="A2")["chip"].startswith("BAD 2 x 910B1 and Ascend910; select the dies of one kind")
    unknown = smi(sample("a2_info").replace("910B1", "910X7"), CHIP="A2")
    assert unknown["chip"] == "? 2 x 910X7, neither A2 nor A3 by its name; "
    assert smi("npu-smi failed") == {}


def test_cards_without_hccs_are_named():
    said = sample("a2_topology").replace(
        "X          HCCS       HCCS       HCCS", "X          HCCS       PHB        SYS"
    )
    found = chips.topology(said, 8)
    assert found.state == "BAD" and found.detail == "2 of 6 pairs without HCCS: 0 and 2 over PHB"
    assert chips.topology(said, 2).detail == "HCCS between all 1 pairs", "a job on two cards uses no other"
    assert chips.topology("not supported", 8).state == "?"


def test_link_that_one_node_does_not_use_may_be_down(tmp_path):
    tool = tmp_path / "hccn_tool"
    tool.write_text(f"#!/bin/bash\n{LINKS.replace('UP', 'DOWN')}\n")
    tool.chmod(0o755)
    die = Chip(3, 0, 3, 3, "910B3")
    assert link(die, str(tool)).state == "BAD"
    assert link(die, str(tool), needed=False).line().endswith("down; a job on one node does not use it")


def test_emulated_chip_is_held_against_the_file(monkeypatch):
    monkeypatch.setattr(node, "emulated", lambda: True)
    monkeypatch.setenv("NPU_EMULATOR_CHIP", "Ascend910B3")
    assert node.chips({"CHIP": "A2"})[0].line().endswith("Atlas A2, emulated")
    monkeypatch.delenv("NPU_EMULATOR_CHIP")
    assert node.chips({"CHIP": "A2"})[0].remedy == "set NPU_EMULATOR_CHIP=Ascend910B3"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_file_of_an_atlas_a2_is_complete_and_its_cards(file, tmp_path):
    """The launcher accepts it once its only placeholder is filled in, and every number is the card's."""
    read_settings = load_script("scripts/doctor.py").read_settings
    with pytest.raises(ValueError, match="MODEL_PATH is still the placeholder"):
        read_settings(file)
    filled = tmp_path / file.name
    filled.write_text(file.read_text().replace("<folder of the model>", str(tmp_path)))
    settings = read_settings(filled)
    card = CARDS[f"A2 with {'64' if '64' in file.name else '32'} GB"]
    assert (settings["CHIP"], settings["DIE_MEMORY"]) == (A2, card.usable)
    assert (settings["NODES"], int(settings["DIES_PER_NODE"])) == ("1", card.dies_per_node)
    assert f"npu-smi shows {card.memory_mib} MB" in file.read_text()
    assert 0.85 < parse_bytes(card.usable) / (card.memory_mib << 20) < 1


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("CHIP=910B", "CHIP=910B is invalid. Set it to the family of the dies, A2 or A3."),
        ("DIE_MEMORY=64GB", "DIE_MEMORY=64GB is invalid: not a size. Set it to the memory of a die"),
    ],
)
def test_invalid_chip_and_memory_rejected(tmp_path, setting, says):
    text = FILES[0].read_text().replace("<folder of the model>", str(tmp_path))
    name = setting.partition("=")[0]
    lines = [setting if line.startswith(f"{name}=") else line for line in text.splitlines()]
    (tmp_path / "c.env").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError) as caught:
        load_script("scripts/doctor.py").read_settings(tmp_path / "c.env")
    assert says in str(caught.value)


def test_file_without_a_chip_describes_an_atlas_a3(tmp_path):
    """Users may have files from before CHIP and DIE_MEMORY could be set."""
    lines = FILES[0].read_text().replace("<folder of the model>", str(tmp_path)).splitlines()
    file = tmp_path / "old.env"
    file.write_text("\n".join(line for line in lines if not line.startswith(("CHIP=", "DIE_MEMORY="))) + "\n")
    parts = "for part in terminal arguments settings cluster; do source scripts/lib/$part.sh; done"
    said = subprocess.run(
        ["bash", "-euc", f'{parts}; cluster_read "$1"; echo "$CHIP $DIE_MEMORY ${{cluster_exports[*]}}"', "bash", file],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said.startswith("A3 61GiB ") and "CHIP=" not in said


def test_sources_name_every_sample():
    folder = Path(__file__).with_name("npu_smi")
    said = (folder / "SOURCES.md").read_text()
    assert [path.name for path in folder.glob("*.txt") if f"`{path.name}`" not in said] == []
