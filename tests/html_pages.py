"""Strict checks of HTML pages: tags that close in order, and no address outside the page."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

_VOID = {"meta", "input", "br", "hr", "img", "link"}
_ADDRESSES = {"src", "href", "action", "data", "poster", "srcset", "xlink:href"}


class StrictPage(HTMLParser):
    """Strict HTML parser. tags: the count of each tag; text: all text outside scripts and styles.

    Raises AssertionError at a tag that is not closed in order, a duplicate identifier, or an address.
    """

    def __init__(self, page: str):
        super().__init__()
        self.tags: dict[str, int] = {}
        self.text = ""
        self._open: list[str] = []
        self._identifiers: set[str] = set()
        self.feed(page)
        self.close()
        assert page.lower().startswith("<!doctype html>")
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag, attributes):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name, value in attributes:
            assert name not in _ADDRESSES, f"<{tag}> goes to {value}"
            assert not name.startswith("on"), f"<{tag}> has {name}"
            if name == "id":
                assert value not in self._identifiers, f"two elements are called {value}"
                self._identifiers.add(value)
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()
        self.text += " " if tag in ("td", "th") else ""

    def handle_data(self, data):
        if not self._open or self._open[-1] not in ("script", "style"):
            self.text += data


def shown_by_chromium(page: Path | str, profile: Path, fragment: str = "", milliseconds: int = 2000) -> str | None:
    """Return the document from a headless Chromium after its scripts ran, or None without an installed Chromium.

    page: a file or an http address. fragment: the part of the address after #. milliseconds: the time limit on the
    browser's virtual clock, which stops during loading and otherwise runs as fast as it can.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        return None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        f"--virtual-time-budget={milliseconds}",
    ]
    address = page.as_uri() if isinstance(page, Path) else page
    command = [browser, *options, "--dump-dom", address + (f"#{quote(fragment, safe='=&')}" if fragment else "")]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
