"""docs/seeds.md: every path, key, test and command in it exists."""

import re
from pathlib import Path

import pytest

from tests.scripts.cluster_files import ROOT
from verl_patches.trainer.configuration_checks import known_keys

PAGES = [ROOT / "docs" / name for name in ("seeds.md", "seeds.zh.md")]
FOLDERS = ("benchmarks/", "deploy/", "docs/", "examples/", "overlay/", "requirements", "scripts/", "tests/")
PATCHES = ("megatron_patches/", "mindspeed_patches/", "verl_patches/", "vllm_patches/", "vllm_ascend_patches/")
# Paths in the document that are not files of this repository.
OTHERS = {"vllm_ascend_patches/0001-FIX-KVcache-NZ.patch", "llm_rl/deepseek"}


def named(page: Path) -> list[str]:
    """Return the text of every pair of backticks."""
    return re.findall(r"`([^`]+)`", page.read_text())


def paths(page: Path) -> set[str]:
    """Return the paths of this project that stand alone or in a command, with the names of their tests."""
    found = set()
    for text in named(page):
        for word in text.replace('"', " ").replace("'", " ").split():
            word = word.removeprefix("./")
            if word.startswith((*FOLDERS, *PATCHES)) or word.startswith("Dockerfile"):
                found.add(word)
    return found - OTHERS


def missing(word: str) -> bool:
    file, _, test = word.partition("::")
    path = ROOT / file
    if not path.exists():
        return True
    return bool(test) and f"\ndef {test}(" not in path.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_paths_and_tests_exist(page):
    found = paths(page)
    assert {word for word in found if missing(word)} == set() and len(found) > 80


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_keys_are_read(page):
    roots = ("actor_rollout_ref.", "algorithm.", "critic.", "monitoring_config.", "reward_model.", "trainer.")
    keys = {text.partition("=")[0] for text in named(page) if text.startswith(roots)}
    assert len(keys) > 25 and {key for key in keys if key not in known_keys()} == set()


def test_each_line_is_shown_by_a_test():
    rows = [line for line in PAGES[0].read_text().splitlines() if line.startswith("| ")]
    lines = [row for row in rows if not row.startswith("| line ")]
    assert len(lines) > 60
    for line in lines:
        shown = line.rstrip(" |").rpartition(" | ")[2]
        assert "`tests/" in shown or "`benchmarks/" in shown, line


def test_missing_test_or_path_detected():
    (exists, *_), text = sorted(paths(PAGES[0])), "tests/scripts/test_image.py::test_no_such"
    assert not missing(exists) and missing(text) and missing("scripts/no_such.py")
