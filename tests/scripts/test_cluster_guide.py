"""The cluster guide in English and in Chinese: its commands and tables are the same, and correct."""

import re

import pytest

from tests.scripts.cluster_files import ROOT

ENGLISH, CHINESE = ((ROOT / "docs" / name).read_text() for name in ("cluster.md", "cluster.zh.md"))


def commands(text: str) -> list[str]:
    """Return the indented lines."""
    return re.findall(r"^    (.+)$", text, re.MULTILINE)


def rows(text: str) -> list[int]:
    """Return the number of rows of every table."""
    return [len(table.splitlines()) for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]


def test_both_languages_have_the_same_commands_tables_and_sections():
    assert commands(ENGLISH) == commands(CHINESE) and len(commands(ENGLISH)) > 15
    assert rows(ENGLISH) == rows(CHINESE)
    assert [
        len(re.findall(rf"^{mark} ", text, re.MULTILINE)) for text in (ENGLISH, CHINESE) for mark in ("#", "##")
    ] == [1, 12] * 2


def test_numbers_of_the_plan_are_the_same():
    english, chinese = (re.findall(r"\d+\.\d+", text) for text in (ENGLISH, CHINESE))
    assert sorted(english) == sorted(chinese)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE])
def test_named_settings_and_options_exist(text):
    settings = (ROOT / "scripts" / "env" / "a3_256_dies.env").read_text()
    named = set(re.findall(r"`((?:HCCL|RAY_TLS|SOCKET|MASTER|OUTPUT)_[A-Z_]+)", text))
    # The file leaves these out, and the guide says when to add them.
    for name in named - {"HCCL_NPU_SOCKET_PORT_RANGE"}:
        assert f"\n{name}=" in settings, name
    launcher = (ROOT / "scripts" / "internal" / "launch.sh").read_text()
    assert all(option in launcher for option in ("--dry-run", "--stop", "--cluster"))
