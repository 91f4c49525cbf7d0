"""Documents in two languages have the same content, and all links work, including those to headings."""

import re
from pathlib import Path

import pytest

from tests.scripts.cluster_files import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "overlay").glob("*.md")])
CHINESE = [path for path in DOCUMENTS if path.name.endswith(".zh.md")]
FOR_USERS = [
    "README",
    "algorithms",
    "architecture",
    "checkpoints",
    "ci-without-an-npu",
    "cluster",
    "cluster-2026",
    "commands",
    "data",
    "evaluation",
    "failure-signs",
    "first-hour",
    "first-hour-2026",
    "glossary",
    "new-in-2026",
    "not-supported",
    "operations",
    "overview",
    "qwen2_5_vl",
    "batch-invariance",
    "rehearsal",
    "reshard",
    "rollout",
    "replay",
    "routing-replay",
    "security",
    "seeds",
    "stacks",
    "tracking",
    "troubleshooting",
    "weights",
    "workspace",
]


def english_of(path: Path) -> Path:
    return path.with_name(path.name.replace(".zh.md", ".md"))


def commands(text: str) -> list[str]:
    """Return the indented lines, without comments, which are translated."""
    lines = re.findall(r"^    (.+)$", text.partition("    overlay/  ")[0], re.MULTILINE)
    return [re.sub(r"\s+# .*", "", line) for line in lines]


def rows(text: str) -> list[int]:
    """Return the number of rows of every table."""
    return [len(table.splitlines()) for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]


def long_transcripts(text: str) -> list[str]:
    """Return the first line of every indented block over 15 lines that is not a list of commands."""
    blocks = [block.split("\n") for block in re.findall(r"(?:^    .+\n?|^\n(?=    ))+", text, re.MULTILINE)]
    found = [[line.strip() for line in block if line.strip()] for block in blocks]
    return [
        lines[0] for lines in found if len(lines) > 15 and not all(re.match("(bash|docker|python) ", x) for x in lines)
    ]


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def anchor(heading: str) -> str:
    """Return the fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_every_guide_that_a_user_follows_is_there_in_both_languages() -> None:
    assert sorted(english_of(path).stem for path in CHINESE) == sorted(FOR_USERS)


@pytest.mark.parametrize("path", CHINESE, ids=lambda path: path.name)
def test_both_languages_have_the_same_content(path: Path) -> None:
    chinese, english = path.read_text(), english_of(path).read_text()
    assert commands(chinese) == commands(english)
    assert rows(chinese) == rows(english)
    assert [line.count("#") for line in re.findall(r"^#+ ", chinese, re.MULTILINE)] == [
        line.count("#") for line in re.findall(r"^#+ ", english, re.MULTILINE)
    ]
    assert f"]({path.name})" in english and f"]({english_of(path).name})" in chinese
    # Names of keys, files and options, in tables and in sentences.
    assert set(re.findall(r"`([\w./=:-]*[./_=][\w./=:-]*)`", chinese)) == set(
        re.findall(r"`([\w./=:-]*[./_=][\w./=:-]*)`", english)
    )


def test_no_transcript_is_longer_than_fifteen_lines() -> None:
    assert {path.name: found for path in DOCUMENTS if (found := long_transcripts(path.read_text()))} == {}
    printed = "".join(f"    step {step}\n\n" for step in range(16))
    assert long_transcripts(f"It prints:\n\n{printed}") == ["step 0"]
    assert long_transcripts(printed.partition("    step 15")[0]) == []
    assert long_transcripts("    bash scripts/test.sh\n" * 16) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", path.read_text())):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        found = path.parent / name if name else path
        assert found.exists(), target
        if fragment and found.suffix == ".md":
            assert fragment in {anchor(heading) for heading in headings(found.read_text())}, target


def test_an_anchor_is_written_as_github_writes_it() -> None:
    assert anchor("6. A first step to compare with") == "6-a-first-step-to-compare-with"
    assert anchor("torch.load") == "torchload"
    assert anchor("5. 启动") == "5-启动"
