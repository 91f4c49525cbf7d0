"""Links between the documents lead somewhere: to a file, and to a heading in it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(document: Path) -> list[str]:
    """Links of a document to what is not there."""
    found = []
    for file, anchor in LINK.findall(document.read_text()):
        target = (document.parent / file) if file else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(f"{file}#{anchor}" if anchor else file)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document):
    assert dead_links(document) == []


def test_a_dead_link_is_noticed(tmp_path):
    (tmp_path / "there.md").write_text("# A heading, with a comma\n")
    document = tmp_path / "document.md"
    document.write_text(
        "[a](there.md#a-heading-with-a-comma) [b](gone.md) [c](there.md#gone) [d](https://example.org/x)"
    )
    assert dead_links(document) == ["gone.md", "there.md#gone"]
