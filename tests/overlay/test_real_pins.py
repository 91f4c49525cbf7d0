"""The pins of this project, and the published documents on their upstreams' histories."""

import re
from pathlib import Path

import pytest

from overlay.pins import Pins

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_the_real_pins_name_every_upstream_once():
    pins = Pins.read()
    names = {upstream.name for upstream in pins.upstreams}
    assert {"verl", "vllm", "vllm-ascend", "megatron-lm", "mindspeed", "mindspeed-llm", "torch"} <= names
    assert pins.patch_packages() == [
        "verl_patches",
        "vllm_patches",
        "vllm_ascend_patches",
        "megatron_patches",
        "mindspeed_patches",
    ]
    assert pins.of_module("megatron.core.parallel_state").release == "0.8.0"
    assert pins.of_module("vllm_ascend.ops").name == "vllm-ascend" and pins.of_module("vllmx") is None
    assert (
        pins.of_module("verl").commit.startswith("54c9b736")
        and "release verl 0.4.0" in pins.of_module("verl").supported()
    )
    assert "verl_patches" in pins.patched_packages() and "torch" not in pins.patched_packages()


def test_the_stacks_pin_no_release_in_common():
    """Any one package therefore tells which stack is installed."""
    old, new = Pins.read(), Pins.read(stack="2026")
    assert (old.stack, new.stack, *old.others, *new.others) == ("2025", "2026", "2026", "2025")
    assert {"verl", "vllm", "vllm-ascend", "megatron-lm", "mindspeed", "mbridge", "torch-npu"} <= {
        upstream.name for upstream in new.upstreams
    }
    assert not {(each.distribution, each.release) for each in old.upstreams if each.release} & {
        (each.distribution, each.release) for each in new.upstreams if each.release
    }
    assert not {*old.patch_packages()} & {*new.patch_packages()}


@pytest.mark.parametrize("stack", ["2025", "2026"])
def test_locks_hold_the_releases_of_the_pins(stack):
    folder = ROOT / "requirements" / ("" if stack == "2025" else stack)
    locked = "".join((folder / f"{name}.lock").read_text() for name in ("runtime", "upstream"))
    versions = {name.replace("_", "-"): version for name, version in re.findall(r"^([\w.-]+)==([^ ;]+)", locked, re.M)}
    pinned = {each.distribution: each.release for each in Pins.read(stack=stack).upstreams if each.release}
    assert {name: versions.get(name) for name in pinned} == pinned


def test_published_histories_name_commits_and_this_projects_patches():
    """The documents under docs/history come from this command: every row has a known form, and the summary fits."""
    table = (DOCS / "upstream" / "README.md").read_text(encoding="utf-8")
    documents = sorted((DOCS / "history").glob("*.md"))
    assert documents
    for document in documents:
        text = document.read_text(encoding="utf-8")
        rows = [line for line in text.splitlines() if line.startswith("| `")]
        counts = [int(word) for word in text.partition("\nOf ")[2].split(".")[0].split() if word.isdigit()]
        assert counts[0] == len(rows) == sum(counts[1:]) > 5
        ends = re.search(r"^From (\w{8}) .*\) to (\w{8}) \(([\d-]+): ", text, re.M)
        assert ends, document.name
        cells = [ends[1], f"{ends[2]} ({ends[3]})", *map(str, counts)]
        assert f"](../history/{document.name}) | {' | '.join(cells)} |" in table
        assert Pins.read().of_module(rows[0].strip("| `").partition(".")[0]).commit.startswith(ends[1])
