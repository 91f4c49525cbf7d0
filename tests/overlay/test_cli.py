"""The commands on a small project of its own: what each prints, to the letter, and its exit code."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from overlay import cli, declaration
from overlay.lock import Lock
from overlay.pins import Pins, Upstream

PINS = """
[acme]
packages = ["acme"]
patch_package = "acme_patches"
release = { distribution = "acme", version = "1.0" }
cluster = { repository = "https://host/acme", commit = "1234567890abcdef", reference = "v1" }
[other]
packages = ["other"]
cluster = { repository = "https://host/other", commit = "abcdef1234567890" }
[absent]
packages = ["absent"]
patch_package = "absent_patches"
cluster = { version = "3" }
"""
FEATURE = """
    from dataclasses import dataclass
    from overlay import Feature, Key
    @dataclass(frozen=True)
    class Doubling:
        enabled: bool = True
        times: int = 2
    DOUBLING = Feature(name="doubling", purpose="twice | as much", section="run.doubling", settings=Doubling,
        keys=(Key("mode", "run.mode", str, None),), switch="run.doubling.enabled",
        is_on=lambda settings: settings.doubling.enabled)
    ALWAYS = Feature(name="always", purpose="always on")
"""
PATCHES = """
    from overlay import add, before_import, wrap
    from acme_patches.features.doubling import ALWAYS, DOUBLING
    @wrap("acme.core:f", feature=DOUBLING, why="two is | more", upstream="docs/upstream/acme-f.md",
        remove_when="f doubles", relies_on=["acme.core:helper"], evidence="executed")
    def f(upstream, x):
        return 2 * upstream(x)
    @add("acme.core:extra", feature=ALWAYS, why="nobody has it", upstream="https://host/acme/pull/1",
        remove_when="upstream has it", after=["acme.core:f"])
    def extra(module):
        return 1
    @before_import("acme.late", feature=ALWAYS, why="early", upstream="not forwarded: a test", remove_when="never")
    def early():
        pass
"""
CORE = "def f(x):\n    return x\n\ndef helper():\n    return 1\n"


@pytest.fixture
def project(bench, monkeypatch, capsys):
    """Runs a command with the project's pins; returns its exit code and its output."""
    monkeypatch.setattr(declaration, "_declared", [])
    bench.write(
        {
            "acme/core.py": CORE,
            "acme/late.py": "",
            "acme/user.py": "from acme.core import f\n",
            "acme_patches/features/doubling.py": FEATURE,
            "acme_patches/core.py": PATCHES,
            "acme_patches/plain.py": "raise RuntimeError('a patch package may hold what nobody imports from here')\n",
        }
    )
    (bench.folder / "pins.toml").write_text(PINS)

    def run(*arguments: str) -> tuple[int, str]:
        code = cli.main(["--pins", str(bench.folder / "pins.toml"), *arguments])
        printed = capsys.readouterr()
        return code, (printed.out + printed.err).replace(str(bench.folder), "FOLDER")

    run.folder = bench.folder
    return run


def test_patches_are_listed_in_the_order_in_which_they_are_applied(project):
    assert project("list") == (
        0,
        "wrap           doubling  acme.core:f\n"
        "add            always    acme.core:extra\n"
        "before_import  always    acme.late\n",
    )
    code, text = project("list", "--json")
    first = json.loads(text)[0]
    assert code == 0 and first == {
        "name": "acme.core:f",
        "kind": "wrap",
        "feature": "doubling",
        "why": "two is | more",
        "upstream": "docs/upstream/acme-f.md",
        "remove_when": "f doubles",
        "switch": "run.doubling.enabled",
        "evidence": "executed",
        "only_here": False,
        "line": 4,
        "relies_on": ["acme.core:helper"],
        "after": [],
        "outside": [],
        "inside": [],
        "declared_in": "acme_patches.core",
    }


def test_a_feature_a_target_a_label_or_a_part_is_explained(project):
    feature = (
        "doubling\n  purpose: twice | as much\n  switch: run.doubling.enabled\n"
        "  configuration: run.doubling.enabled=true, run.doubling.times=2, run.mode=null\n  patches: acme.core:f\n"
    )
    patch = (
        "acme.core:extra\n  kind: add\n  feature: always\n  why: nobody has it\n  upstream: https://host/acme/pull/1\n"
        "  remove when: upstream has it\n  evidence: checked\n  line: 8\n  after: acme.core:f\n"
        "  declared in: acme_patches.core\n  supported: cluster pin v1, release acme 1.0\n"
    )
    assert project("explain", "doubling") == (0, feature)
    for name in ("acme.core:extra", "acme.core:extra@always", "extra"):
        assert project("explain", name) == (0, patch)
    code, text = project("explain", "core")
    assert code == 0 and [line for line in text.splitlines() if line[0] != " "] == ["acme.core:f", "acme.core:extra"]
    assert project("explain", "gone") == (2, "no patch has the name 'gone'. `python -m overlay list` lists them\n")
    assert [each["name"] for each in json.loads(project("explain", "doubling", "--json")[1])] == ["doubling"]


def commit(folder: Path, *names: str) -> str:
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t"]
    for command in (["init", "-q"], ["add", *names], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_the_lock_is_made_of_pinned_sources_and_the_check_held_against_it(project):
    pinned = commit(project.folder, "acme")
    pins = project.folder / "pins.toml"
    pins.write_text(PINS.replace("1234567890abcdef", pinned))
    code, text = project("lock", "--upstream", f"acme={project.folder}@{'0' * 40}")
    assert (
        code == 2 and text.startswith(f"git has no {'0' * 40} with acme in FOLDER: fatal: ") and text.count("\n") == 1
    )
    assert project("lock", "--upstream", f"acme={project.folder}") == (
        2,
        "only pinned sources can be locked. Set acme=PATH@v1\n",
    )
    assert project("lock", "--upstream", f"acme={project.folder}@{pinned}") == (
        0,
        "wrote fingerprints.lock.json: 2 targets in 1 modules\n  not locked: no source of acme 1.0 was given\n",
    )
    lock = Lock.read(project.folder / "fingerprints.lock.json")
    assert {target: set(releases) for target, releases in lock.targets.items()} == {
        "acme.core:f": {"v1"},
        "acme.core:helper": {"v1"},
    }

    copied = "  copied     acme.core:f is copied on import by acme.user\n"
    assert project("check", "--upstream", f"acme={project.folder}") == (
        0,
        f"acme: FOLDER\n{copied}  4 OK\nclean\n",
    )
    (project.folder / "acme/core.py").write_text(CORE.replace("return 1", "return 2").replace("f(x)", "f(x, y)"))
    assert project("check", "--upstream", f"acme={project.folder}") == (
        1,
        "acme: FOLDER\n  SIGNATURE  acme.core:f: v1 have (x), but here it is (x, y)\n"
        f"{copied}"
        "  DRIFT      acme.core:helper (relied on by acme.core:f@doubling): its body differs from the one in v1\n"
        "  1 DRIFT, 2 OK, 1 SIGNATURE\ndrift\n",
    )
    code, text = project("check", "--json", "--upstream", f"acme={project.folder}@{pinned}")
    found = json.loads(text)
    assert code == found["exit"] == 0 and found["checked"][0]["source"] == f"FOLDER at {pinned}"
    assert [each["status"] for each in found["checked"][0]["verdicts"]] == ["OK"] * 4
    # This folder is the installed copy, and it has no distribution.
    code, text = project("check")
    assert code == 1 and text.startswith("acme: acme without version (not installed by pip) in ")
    other_lock = project.folder / "empty.json"
    code, text = project("--lock", str(other_lock), "check", "--upstream", f"acme={project.folder}@{pinned}")
    assert code == 2 and text.endswith("  2 OK, 2 UNVERIFIED\nnot everything could be verified\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check", "--upstream", "acme"], "--upstream='acme' is invalid. Set it to NAME=PATH or NAME=PATH@COMMIT"),
        (["check", "--upstream", "=x"], "'' is not an upstream; pins.toml has acme, other, absent"),
        (["check", "--upstream", "acme="], "--upstream='acme=' is invalid. Set it to NAME=PATH or NAME=PATH@COMMIT"),
        (["bisect", "--upstream", "acme"], "--upstream='acme' is invalid. Set it to NAME=CHECKOUT"),
        (
            ["bisect", "--upstream", "acme=x", "a..", "--json"],
            "the range 'a..' is invalid. Write FIRST..LAST; the pin of",
        ),
    ],
)
def test_arguments_that_cannot_be_meant_are_one_sentence(project, arguments, sentence):
    code, text = project(*arguments)
    assert code == 2 and text.startswith(sentence) and text.count("\n") == 1


def test_sources_are_named_for_scripts_by_tabs(project):
    assert project("pins") == (
        0,
        "acme\thttps://host/acme\t1234567890abcdef\tv1\nother\thttps://host/other\tabcdef1234567890\t-\n",
    )


def test_the_document_has_a_row_for_each_feature_and_each_patch(project):
    assert project("docs") == (0, "wrote FOLDER/patches.md\n")
    text = (project.folder / "patches.md").read_text()
    assert text[text.index("## Features") :] == (
        "## Features\n\n"
        "A feature's parts are patches of upstream and middleware of this project; one without either is called by "
        "name.\n\n| Feature | Purpose | Switch | Configuration | Parts |\n| --- | --- | --- | --- | --- |\n"
        "| always | always on | always on | none of its own | 2 patches |\n"
        "| doubling | twice \\| as much | `run.doubling.enabled` | `run.doubling`: `enabled: true`, `times: 2` "
        "| 1 patch |\n"
        "\n## acme\n\nSupported: cluster pin v1, release acme 1.0.\n\n"
        "| Target | Kind | Feature | Why | Upstream | Remove when | Switch | Evidence |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| `acme.core:extra` | add | always | nobody has it | https://host/acme/pull/1 | upstream has it | always on "
        "| checked |\n"
        "| `acme.core:f` | wrap | doubling | two is \\| more | draft: [acme-f](upstream/acme-f.md) | f doubles "
        "| `run.doubling.enabled` | executed |\n"
        "| `acme.late` | before_import | always | early | not forwarded: a test | never | always on | checked |\n"
    )
    assert project("docs", "--to", str(project.folder / "made" / "table.md"))[0] == 0
    assert (project.folder / "made" / "table.md").read_text() == text


def test_middleware_is_counted_with_patches(project):
    """A feature used only by the project's loop has no patch; the project itself calls one that no list contains."""
    features = "".join(f"{name.upper()} = Feature(name='{name}', purpose='{name}')\n" for name in ("loop", "named"))
    (project.folder / "acme_patches/features/loop.py").write_text(f"from overlay import Feature\n{features}")
    (project.folder / "acme_steps.py").write_text(
        "from types import SimpleNamespace as Entry\n"
        "from acme_patches.features.doubling import DOUBLING\nfrom acme_patches.features.loop import LOOP\n"
        "STEPS = (Entry(feature=LOOP), Entry(feature=DOUBLING), Entry(feature=LOOP))\n"
    )
    (project.folder / "pins.toml").write_text(f'middleware = ["acme_steps:STEPS"]\n{PINS}')
    assert project("docs")[0] == 0
    rows = (project.folder / "patches.md").read_text().partition("## acme")[0].splitlines()
    assert {
        row.split(" | ")[0].strip("| "): row.split(" | ")[-1].strip("| ") for row in rows if row.startswith("| ")
    } == {
        "Feature": "Parts",
        "---": "---",
        "always": "2 patches",
        "doubling": "1 patch, 1 middleware",
        "loop": "2 middleware",
        "named": "called by name",
    }
    assert project("explain", "loop")[1] == "loop\n  purpose: loop\n  middleware: acme_steps:STEPS\n"


GENERATORS = """
generated = [
    { module = "acme_tools.fails", file = "made/kept.md" },
    { module = "acme_tools.prints", file = "made/printed.md" },
    { module = "acme_tools.writes" },
]
"""


def test_update_writes_every_generated_file(project, monkeypatch):
    """A generator that fails leaves its file as it was, is named with its reason, and does not stop the others."""
    pinned = commit(project.folder, "acme")
    tools = {
        "fails": "import sys\nprint('half')\nsys.exit('no such table')\n",
        "prints": "print('# Printed \u2713')\n",
        "writes": "from pathlib import Path\nPath('written.txt').write_text('by itself')\n",
    }
    for folder in ("acme_tools", "made"):
        (project.folder / folder).mkdir()
    for name, text in tools.items():
        (project.folder / f"acme_tools/{name}.py").write_text(text)
    (project.folder / "made/kept.md").write_text("whole")
    (project.folder / "pins.toml").write_text(GENERATORS + PINS.replace("1234567890abcdef", pinned))
    monkeypatch.chdir(project.folder)
    code, text = project("update", "--upstream", f"acme={project.folder}@{pinned}")
    assert code == 2 and text == (
        "wrote fingerprints.lock.json: 2 targets in 1 modules\n  not locked: no source of acme 1.0 was given\n"
        "wrote FOLDER/patches.md\n"
        "  not written: python -m acme_tools.fails failed with exit code 1: no such table\n"
        "wrote FOLDER/made/printed.md\nran acme_tools.writes\n"
    )
    assert "| doubling |" in (project.folder / "patches.md").read_text()
    assert (project.folder / "made/kept.md").read_text() == "whole"
    assert (project.folder / "made/printed.md").read_text(encoding="utf-8") == "# Printed \u2713\n"
    assert (project.folder / "written.txt").read_text() == "by itself"
    (project.folder / "acme_tools/fails.py").write_text("print('mended')\n")
    code, text = project("update")
    assert code == 0 and (project.folder / "made/kept.md").read_text() == "mended\n"
    assert Lock.read(project.folder / "fingerprints.lock.json").targets["acme.core:f"]["v1"], "kept without its source"


def test_a_history_is_printed_written_as_json_and_as_a_document(project):
    first = commit(project.folder, "acme")
    (project.folder / "acme/core.py").write_text(CORE + "\nextra = 1\n")
    last = commit(project.folder, "acme")
    walk = ["bisect", "--upstream", f"acme={project.folder}", f"{first}..{last}"]
    day = re.compile(r"\d{4}-\d\d-\d\d")
    code, text = project(*walk)
    assert (code, day.sub("DAY", text)) == (
        1,
        f"acme.core:f@doubling\n  changes: never\nacme.core:extra@always\n  changes: DAY {last[:8]} all: CONFLICT\n"
        f"  breaks: DAY {last[:8]} all: CONFLICT\nacme.late@always\n  changes: never\n",
    )
    code, text = project(*walk, "--json")
    assert code == 1 and [(each["patch"], each["fits"], each["lost"]) for each in json.loads(text)] == [
        ("acme.core:f@doubling", True, False),
        ("acme.core:extra@always", False, True),
        ("acme.late@always", True, False),
    ]
    code, text = project(*walk, "--markdown")
    text = day.sub("DAY", text)
    assert f"From {first[:8]} (DAY: all) to {last[:8]} (DAY: all).\n" in text
    assert "Of 3 patches 2 fit the last commit as they are, 0 have to be read and 1 cannot be applied." in text
    event = f"DAY {last[:8]} all: CONFLICT"
    assert f"| `acme.core:extra@always` | {event} | {event} |  |\n" in text
    assert project("bisect", "--upstream", f"acme={project.folder}", f"{first}..{first}")[0] == 0


STACKS = """
default_stack = "old"
[stack.old.acme]
packages = ["acme"]
patch_package = "acme_patches"
release = { distribution = "acme", version = "1.0" }
[stack.new.acme]
packages = ["acme"]
patch_package = "acme_plugin"
release = { distribution = "acme", version = "2.0" }
"""
PLUGIN = """
    from overlay import Feature, wrap
    NEWER = Feature(name="newer", purpose="a test")
    @wrap("acme.core:helper", feature=NEWER, why="a test", upstream="not forwarded: a test", remove_when="never")
    def helper(upstream):
        return upstream()
"""


def install(folder: Path, version: str) -> None:
    """Write the metadata that an installer leaves beside the package."""
    information = folder / "acme.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme\nVersion: {version}\n")


def test_each_stack_has_its_patches_its_lock_and_its_document(project, bench):
    bench.write({"acme_plugin/patches/acme/core.py": PLUGIN})
    (project.folder / "pins.toml").write_text(STACKS)
    install(project.folder, "2.0")
    assert project("list")[1].count("\n") == 3
    assert project("list", "--stack", "new") == (0, "wrap  newer  acme.core:helper\n")
    assert project("lock", "--stack", "new") == (
        0,
        "wrote fingerprints.new.lock.json: 1 targets in 1 modules\n",
    )
    assert Lock.read(project.folder / "fingerprints.new.lock.json").targets.keys() == {"acme.core:helper"}
    assert project("check", "--stack", "new") == (0, "acme: acme 2.0 in FOLDER\n  1 OK\nclean\n")
    assert project("docs", "--stack", "new") == (0, "wrote FOLDER/patches-new.md\n")
    # The installed packages belong to the other stack; a folder given on the command line is checked all the same.
    code, text = project("check")
    assert (
        code == 2
        and text.startswith("the patches of stack old do not fit the installed packages")
        and text.count("\n") == 1
    )
    assert project("check", "--upstream", f"acme={project.folder}")[1].endswith("not everything could be verified\n")
    assert project("list", "--stack", "odd") == (
        2,
        "--stack=odd is invalid: no such stack. Set it to old or new.\n",
    )


def test_patches_are_not_activated_beside_another_stack(project, bench):
    bench.write({"acme_plugin/patches/acme/core.py": PLUGIN})
    (project.folder / "pins.toml").write_text(STACKS)
    script = """
        import pathlib, sys
        import overlay
        try:
            overlay.activate(pathlib.Path(sys.argv[1]), stack=sys.argv[2])
        except overlay.OverlayError as error:
            print(type(error).__name__, "acme_patches.core" in sys.modules)
        else:
            print(overlay.report().pending)
    """
    for version, stack, printed in (
        ("2.0", "", "StackError False"),
        ("1.0", "new", "StackError False"),
        ("2.0", "new", "['acme.core:helper']"),
    ):
        install(project.folder, version)
        assert bench.run(script, str(project.folder / "pins.toml"), stack).strip() == printed


def test_absent_upstream_without_release_is_left_out(bench):
    """Nobody can install it there; one with a release stays, and is reported as not verified."""
    upstreams = (
        Upstream("source", ("absent_source",), "source_patches", commit="1234567890"),
        Upstream("wheel", ("absent_wheel",), "wheel_patches", distribution="absent-wheel", release="1.0"),
    )
    patches = [bench.patch("wrap", f"{upstream.packages[0]}:f", print) for upstream in upstreams]
    found = list(cli._installed(patches, Pins(upstreams)))
    assert found == [(upstreams[1], None)]
