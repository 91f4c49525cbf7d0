"""The documentation site builds in strict mode, all links and anchors work, and no other host is contacted."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from scripts.internal import site_pages
from tests.scripts.cluster_files import ROOT

PYTHON = ROOT / ".venv.docs" / "bin" / "python"
# Elements that a page must have in equal numbers on GitHub and on the site.
COUNTED = re.compile(r"<(h[1-6]|table|tr|td|ul|ol|li|pre|code|a|img|strong|em)[ >]")
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
# Renders pages, given as a JSON list of texts, as MkDocs does.
RENDER = (
    "import json, sys, markdown\n"
    "extensions = ['attr_list', 'tables', 'fenced_code']\n"
    "print(json.dumps([markdown.markdown(text, extensions=extensions) for text in json.load(sys.stdin)]))"
)


class Page(HTMLParser):
    """A page's links, the files that it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.headings: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
            if re.fullmatch("h[1-6]", tag):
                self.headings.append(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("link", "script", "img", "iframe", "source"):
            self.loaded += [values[name] for name in ("href", "src") if name in values]


def mkdocs(folder: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout as scripts/docs.sh does."""
    assert PYTHON.exists(), "bash scripts/docs.sh sets up .venv.docs/, as scripts/test.sh does"
    command = [PYTHON, "-m", "mkdocs", "build", "--strict", "--config-file", folder / "mkdocs.yml"]
    return subprocess.run([*command, "--site-dir", output], cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("site")
    built = mkdocs(ROOT, output)
    assert built.returncode == 0, built.stderr
    return output


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Return every page of the site, by its path in it."""
    return {path.relative_to(site): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


def broken_links(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Yield the links of the pages to a missing file of the site, or to a missing anchor of a page."""
    for name, page in pages.items():
        # The links of the 404 page start at the server's root.
        for link in page.links + page.loaded if name.name != "404.html" else ():
            path, _, fragment = link.partition("#")
            if "://" in link or link.startswith(("data:", "mailto:")):
                continue
            target = (site / name).parent.joinpath(path).resolve() if path else (site / name).resolve()
            target = target / "index.html" if target.is_dir() else target
            there = pages.get(target.relative_to(site.resolve())) if target.exists() else None
            if not target.exists() or (there and fragment and fragment not in there.anchors):
                yield f"{name}: {link}"


def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 100 and list(broken_links(site, pages)) == []


def test_broken_link_or_anchor_detected(site: Path, pages: dict[Path, Page]) -> None:
    page = Page(
        '<a href="zh/index.html#no-such">a</a><a href="gone.html">b</a><a href="zh/index.html#two-commands">c</a>'
    )
    found = list(broken_links(site, pages | {Path("index.html"): page}))
    assert [each for each in found if each.startswith("index.html: ")] == [
        "index.html: zh/index.html#no-such",
        "index.html: gone.html",
    ]


def test_site_asks_no_other_host(site: Path, pages: dict[Path, Page]) -> None:
    loaded = {each for page in pages.values() for each in page.loaded}
    assert loaded and not [each for each in loaded if "//" in each]
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert styles and not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\s]*", styles)
    # For such elements, the theme's script loads a library from another host.
    assert not [name for name in pages if re.search(r'class="(?:mermaid|arithmatex)', (site / name).read_text())]


def test_both_languages_have_the_same_pages_and_anchors(pages: dict[Path, Page]) -> None:
    """A page that exists only in English links into Chinese pages by the same anchors."""
    english = {name for name in pages if name.parts[0] != "zh" and name.name != "404.html"}
    assert {Path("zh") / name for name in english} == {name for name in pages if name.parts[0] == "zh"}
    for name in english:
        assert pages[name].headings == pages[Path("zh") / name].headings, name


def test_navigation_is_translated(site: Path) -> None:
    text = (site / "zh" / "commands.html").read_text()
    entries = {" ".join(each.split()) for each in re.findall(r'<span class="md-ellipsis">\s*([^<]+?)\s*<', text)}
    plain = {"Commands", "Benchmarks", "Troubleshooting", "Algorithms"}
    assert {"命令", "基准测试", "故障排查", "算法"} <= entries and not plain & entries


@pytest.mark.parametrize(
    ("word", "page"),
    [("断点续训", "zh/checkpoints.html"), ("显存", "zh/qwen2_5_vl.html"), ("rollout_rebalance", "rollout.html")],
)
def test_search_knows_words_of_both_languages(site: Path, word: str, page: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert index["config"]["lang"] == ["en", "zh"]
    # The browser splits the text as the index says; Chinese words are separated by zero-width spaces.
    separator = re.compile("[\\s\\u200b" + re.escape("，。、：；（）<>`/()=.|") + "]+")
    found = {
        entry["location"].partition("#")[0]
        for entry in index["docs"]
        if word in separator.split(f"{entry['title']} {entry['text']}")
    }
    assert page in found


def documents() -> list[str]:
    beside = [*site_pages.BESIDE_THE_CODE]
    return sorted([*beside, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))])


def test_pages_show_what_github_shows(tmp_path: Path) -> None:
    """The reference is CommonMark, which GitHub renders: equal numbers of items, code blocks, tables and links."""
    referee = MarkdownIt("commonmark", {"html": True}).enable("table")
    copies = site_pages.Site(ROOT, tmp_path)
    texts = {name: FRONT_MATTER.sub("", copies.page(name)) for name in documents()}
    asked = json.dumps([*texts.values()])
    done = subprocess.run([PYTHON, "-c", RENDER], input=asked, capture_output=True, text=True, check=True)
    for name, shown in zip(texts, json.loads(done.stdout), strict=True):
        original = site_pages._OTHER_LANGUAGE.sub("", (ROOT / name).read_text(), count=1)
        assert Counter(COUNTED.findall(shown)) == Counter(COUNTED.findall(referee.render(original))), name


def test_only_changed_pages_are_written_again(small: Path) -> None:
    """`mkdocs serve` watches its input, so writing an unchanged page would start another build."""
    copies = site_pages.Site(small, small / "pages")
    copies.write()
    before = {path: path.stat().st_mtime_ns for path in (small / "pages").rglob("*") if path.is_file()}
    (small / "docs" / "data.md").write_text("# Another title\n\n## Part\n")
    copies.write()
    changed = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    # The Chinese page uses the English one's anchors.
    assert changed == {"data.md", "data.zh.md"}
    assert (small / "pages" / "data.zh.md").read_text().startswith("# Title {#another-title}")


def test_lists_indented_by_four() -> None:
    text = "1. First:\n\n       code\n\n   - inner\n     goes on\n2. Second\n\nText:\n- one\n\n  more\n"
    assert site_pages.with_indented_lists(text) == (
        "1. First:\n\n        code\n\n    - inner\n        goes on\n2. Second\n\nText:\n\n- one\n\n    more\n"
    )
    fenced = "```\n- a\n  b\n```\n"
    assert site_pages.with_indented_lists(fenced) == fenced


def test_anchors_are_those_of_github() -> None:
    text = "# 6. A first step\n\n## torch.load\n\n```\n# none\n```\n\n## torch.load\n\n## 5. 启动\n"
    assert site_pages.anchors(text) == ["6-a-first-step", "torchload", "torchload-1", "5-启动"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Make a checkout with the site's configuration, and one short page in place of each document."""
    for name in ("mkdocs.yml", "scripts/internal/site_pages.py", "docs/site"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, target)
    for name in documents():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# Title\n\n## Part\n")
    return tmp_path


def test_strict_build_stops_at_a_broken_link(small: Path) -> None:
    (small / "README.md").write_text("# Title\n\n[right](docs/data.md#part) and [source](mkdocs.yml)\n\n## Part\n")
    assert mkdocs(small, small / "site").returncode == 0
    assert (small / "site" / "source" / "mkdocs-yml.html").exists()
    (small / "docs" / "data.md").write_text("# Title\n\n[gone](gone.md), [wrong](weights.md#no-such)\n\n## Part\n")
    (small / "docs" / "new.md").write_text("# In no navigation\n")
    broken = mkdocs(small, small / "again")
    assert broken.returncode == 1
    assert "'gone.md'" in broken.stderr and "'#no-such'" in broken.stderr and "new.md" in broken.stderr


def run_docs(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "scripts/docs.sh", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_dry_run_prints_the_build() -> None:
    done = run_docs("--dry-run", "--output", "/tmp/site")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("run ")
    assert {"--strict", "/tmp/site", str(PYTHON)} <= set(done.stdout.split()) and "--quiet" not in done.stdout
    served = run_docs("--dry-run", "--serve", "--port", "8001")
    assert served.stdout.endswith("--strict --dev-addr 127.0.0.1:8001\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--output", "docs"), "docs is invalid: it contains something other than a site"),
        (("--output", "README.md"), "README.md is invalid"),
        (("--serve", "--output", "out"), "--output is invalid with --serve"),
        (("--port", "0"), "--port=0 is invalid. Set it to a whole number from 1"),
        (("--port",), "--port needs a value"),
        (("build",), 'Unknown argument "build"'),
    ],
)
def test_invalid_argument_of_docs_rejected(arguments: tuple[str, ...], says: str) -> None:
    done = run_docs("--dry-run", *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr


def test_hook_needs_no_package_of_this_environment() -> None:
    """MkDocs runs it in .venv.docs, which does not have these packages."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import site_pages"
    folder = ROOT / "scripts" / "internal"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
