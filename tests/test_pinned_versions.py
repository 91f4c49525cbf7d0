"""Upstream versions named in the product's text match pins.toml, so that a version bump finds all of them."""

import re
import subprocess
from pathlib import Path

from overlay.discovery import load_features
from overlay.pins import Pins

ROOT = Path(__file__).resolve().parents[1]
PINS = Pins.read()
PRODUCT = (*PINS.patch_packages(), "overlay", "post_training", "rehearsal", "scripts")
VERSION = re.compile(r"(?P<section>sections? (?:[\d., and]|with)*)?(?<![\w.-])v?(?P<version>\d+\.\d+\.\d+)(?![\d.])")
"""Other releases ("since megatron-core 0.10") are written with two numbers; sections of papers may have three."""


def pinned() -> set[str]:
    """Return the versions in pins.toml: releases, cluster software, and versions in tag names."""
    return set(re.findall(r"\d+\.\d+\.\d+", (ROOT / "overlay" / "pins.toml").read_text()))


def not_pinned(source: str) -> list[str]:
    """Return the versions in a text that are not in pins.toml."""
    found = [match["version"] for match in VERSION.finditer(source) if not match["section"]]
    return [version for version in found if version not in pinned()]


def test_the_product_names_pinned_versions_only():
    listed = [
        "git",
        "ls-files",
        "-z",
        "--",
        *(f"{folder}/*.{end}" for folder in PRODUCT for end in ("py", "sh", "yaml")),
    ]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    # Messages of other programs, verbatim.
    names = [name for name in names if name and name != "post_training/recovery/signs.py"]
    texts = {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}
    assert sum("0.4.0" in text for text in texts.values()) > 10
    assert {name: found for name, text in texts.items() if (found := not_pinned(text))} == {}


def test_unpinned_version_detected():
    assert not_pinned("verl 0.4.1 and vLLM v0.9.1, arXiv, section 2.1.2") == ["0.4.1"]
    assert not_pinned("since megatron-core 0.10, at 127.0.0.1, sections 1.4.1 and 1.4.2") == []


def test_no_feature_has_a_version_in_its_name():
    assert [feature.name for feature in load_features(PINS.patch_packages()) if re.search(r"\d", feature.name)] == []
