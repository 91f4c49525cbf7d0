"""The pages of the documentation site: MkDocs reads copies of the repository's documents from one folder.

The documents are written for GitHub and stay so. This hook of mkdocs.yml changes the copies: a link to a document leads
to its page, and one to source code to a page that shows it; headings get the anchors that GitHub gives them, those of
the English page in both languages, so that a link fits either; and lists are indented as Python-Markdown wants them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Documents outside docs/, and the pages that they become.
BESIDE_THE_CODE = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "npu_emulator/README.md": "npu-emulator.md",
    "overlay/README.md": "overlay.md",
    "overlay/another-upstream.md": "another-upstream.md",
}
# Names of Pygments for the files that documents link to; anything else is shown as it is.
_LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".json": "json", ".env": "bash"}
# Code spans, which are left alone, or the target of a link.
_LINK = re.compile(r"(?P<code>(?P<ticks>`+).+?(?P=ticks))|\]\((?P<target>[^()\s]+)\)", re.DOTALL)
_OTHER_LANGUAGE = re.compile(r"^(?:中文版?|English)[:：] *\[[^\]]*\]\([^)]*\)\n\n?", re.MULTILINE)
_HEADING = re.compile(r"^(#+) (.+?) *$")
# A line that ends and one that begins with a character that is written without spaces.
_CHINESE = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef“”]"
_CHINESE_BREAK = re.compile(rf"(?<={_CHINESE})\n *(?={_CHINESE})")
_ITEM = re.compile(r"^( {0,3})([-*+]|\d+\.) +(?=\S)")


def anchor(heading: str) -> str:
    """Return the fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text: str) -> list[str]:
    """Return the anchors of all headings of a document, in their order; of equal ones the later are numbered."""
    found: list[str] = []
    for line in _lines_outside_fences(text):
        if heading := _HEADING.match(line):
            name = plain = anchor(heading[2])
            number = 0
            while name in found:
                number += 1
                name = f"{plain}-{number}"
            found.append(name)
    return found


def _lines_outside_fences(text: str) -> Iterator[str]:
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def with_anchors(text: str, names: list[str]) -> str:
    """Write the anchor of each heading after it."""
    left = iter(names)
    return _map_lines(text, lambda line: f"{line.rstrip()} {{#{next(left)}}}" if _HEADING.match(line) else line)


def _map_lines(text: str, change: Callable[[str], str]) -> str:
    """Change every line outside fenced blocks."""
    fenced, lines = False, []
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        lines.append(line if fenced else change(line))
    return "\n".join(lines) + "\n"


def with_indented_lists(text: str) -> str:
    """Indent the content of items by four spaces per level, and separate lists and tables from a paragraph above.

    Python-Markdown treats anything less as a new paragraph, whereas CommonMark counts from the marker's width.
    """
    # For each open item, the column at which its text begins, here and in the result.
    items: list[tuple[int, int]] = []
    before = ""

    def change(line: str) -> str:
        nonlocal before
        if not line.strip():
            before = ""
            return ""
        indent = len(line) - len(line.lstrip(" "))
        while items and indent < items[-1][0]:
            items.pop()
        source, result = items[-1] if items else (0, 0)
        item, nested = _ITEM.match(line[source:]), bool(items)
        changed = " " * result + line[source:]
        # Only in CommonMark may a list or a table follow a paragraph without a blank line.
        parted = "\n" if before == "text" and (item or line.lstrip().startswith("|")) else ""
        if item:
            changed = " " * (result + len(item[1])) + line[source + len(item[1]) :]
            items.append((source + item.end(), result + len(item[1]) + 4))
        kind = "item" if item or nested else "table" if line.lstrip().startswith("|") else "text"
        before = "item" if before == "item" and kind == "text" else kind
        return parted + changed

    return _map_lines(text, change)


def _source_page_name(path: str) -> str:
    """Return the page that shows a source file, without dots: `.py` before `.md` would be taken for a language."""
    return f"source/{path.replace('.', '-')}.md"


@dataclass(frozen=True)
class Site:
    """The pages that are written to the folder `pages`, from the repository at `root`."""

    root: Path
    pages: Path
    sources: set[str] = field(default_factory=set)

    def page_of(self, document: str) -> str | None:
        """Return the page of a document or picture of the repository, or None if the site does not have it."""
        if document in BESIDE_THE_CODE:
            return BESIDE_THE_CODE[document]
        return document.removeprefix("docs/") if document.startswith("docs/") else None

    def write(self) -> None:
        """Write all pages, pictures and the source files to which they link."""
        documents = [str(path.relative_to(self.root)) for path in (self.root / "docs").rglob("*") if path.is_file()]
        for document in sorted([*BESIDE_THE_CODE, *documents]):
            page = str(self.page_of(document))
            content = self.page(document).encode() if page.endswith(".md") else (self.root / document).read_bytes()
            self._write_changed(page, content)
        for source in self.sources:
            self._write_changed(_source_page_name(source), self.source_page(source).encode())

    def _write_changed(self, page: str, content: bytes) -> None:
        """Write a page unless it is there: `mkdocs serve` watches the folder, and would build for ever."""
        target = self.pages / page
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

    def page(self, document: str) -> str:
        """Return the page of a document."""
        text = (self.root / document).read_text(encoding="utf-8")
        names = anchors(self._english(document).read_text(encoding="utf-8"))
        text = _OTHER_LANGUAGE.sub("", text, count=1)
        text = with_anchors(text, names)
        text = _LINK.sub(lambda link: self._link(document, link), text)
        # A browser would show the line break of a Chinese paragraph as a space.
        text = _CHINESE_BREAK.sub("", text)
        # The home page has no others beside it in the navigation.
        front = "---\nhide: [navigation]\n---\n" if self.page_of(document) in ("index.md", "index.zh.md") else ""
        return front + with_indented_lists(text)

    def source_page(self, source: str) -> str:
        """Return a page that shows a file of the repository, which the search leaves out."""
        text = (self.root / source).read_text(encoding="utf-8")
        language = _LANGUAGES.get(Path(source).suffix, "text")
        front = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
        return f"{front}# {source}\n\n````{language}\n{text}````\n"

    def _english(self, document: str) -> Path:
        return self.root / document.replace(".zh.md", ".md")

    def _link(self, document: str, link: re.Match[str]) -> str:
        target = link["target"]
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        name, _, fragment = target.partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(document), name)) if name else document
        page = self.page_of(there)
        if page is None:
            page = self._source(there)
            if page is None:
                return link[0]
        elif fragment:
            fragment = self._english_anchor(there, fragment)
        here = str(self.page_of(document))
        # MkDocs finds the page of the language that it is building by the name without one.
        relative = os.path.relpath(page.replace(".zh.md", ".md"), os.path.dirname(here) or ".")
        return f"]({relative}{'#' if fragment else ''}{fragment})"

    def _source(self, path: str) -> str | None:
        """Return the page that shows a file, or None if there is no such file."""
        if not (self.root / path).is_file():
            return None
        self.sources.add(path)
        return _source_page_name(path)

    def _english_anchor(self, document: str, fragment: str) -> str:
        """Return the anchor of the English page for one of a Chinese page."""
        here = anchors((self.root / document).read_text(encoding="utf-8"))
        english = anchors(self._english(document).read_text(encoding="utf-8"))
        return dict(zip(here, english, strict=True)).get(fragment, fragment)


# Kept until MkDocs ends: each language is a build of its own over the same pages.
_folder: tempfile.TemporaryDirectory[str] | None = None


def on_config(config: Any) -> Any:
    """Let MkDocs take its pages from a folder that is written now."""
    global _folder
    _learn_chinese_words()
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="site-pages-")
    Site(ROOT, Path(_folder.name)).write()
    config.docs_dir = _folder.name
    return config


def _learn_chinese_words() -> None:
    """Teach jieba, which splits Chinese text into words for the search, the words of this field.

    Its table of words is kept in .cache, not in the /tmp that all users of the machine share.
    """
    import jieba

    (ROOT / ".cache").mkdir(exist_ok=True)
    jieba.dt.tmp_dir = str(ROOT / ".cache")
    jieba.setLogLevel(logging.WARNING)
    jieba.load_userdict(str(ROOT / "docs" / "site" / "words.txt"))


def on_post_build(config: Any) -> None:
    """Copy the list of pages to the Chinese ones too, where the theme's script looks for it."""
    listed, chinese = Path(config.site_dir) / "sitemap.xml", Path(config.site_dir) / "zh"
    if listed.exists() and chinese.is_dir():
        shutil.copyfile(listed, chinese / "sitemap.xml")


def on_shutdown() -> None:
    """Remove the folder."""
    if _folder is not None:
        _folder.cleanup()
