"""The declared patches against upstream's source as it is installed here. Nothing of upstream is imported."""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from functools import cache

import pytest

from overlay import check as checking
from overlay.declaration import MODULE_KINDS
from overlay.definitions import find_definition
from overlay.discovery import load, package_folders, patch_files
from overlay.documentation import DOCUMENT, DRAFTS, document
from overlay.drift import depends_on
from overlay.lock import Lock
from overlay.ordering import make_plan
from overlay.pins import Pins, within
from overlay.sources import Sources, installed
from tests.overlay import mutations, restating, standing
from tests.overlay.conftest import REPOSITORY

PINS = Pins.read()
PATCHES = make_plan(load(PINS.patch_packages())).patches
# The stack 2026, whose upstreams are not installed beside those: checks that do not need them.
LATER_PINS = Pins.read(stack="2026")
LATER_PATCHES = make_plan(load(LATER_PINS.patch_packages())).patches
NAMED = [pytest.param(patch, id=patch.label) for patch in PATCHES]
LATER = [pytest.param(patch, id=patch.label) for patch in LATER_PATCHES]
INDEX = REPOSITORY / DRAFTS / "README.md"
CHANGED = [pytest.param(patch, id=patch.label) for patch in PATCHES if patch.target in depends_on(patch)]


@cache
def sources_of(name):
    return installed(next(upstream for upstream in PINS.upstreams if upstream.name == name))


def source_of(module):
    """Return the source of an upstream module; skips the test if that upstream is not installed."""
    sources = sources_of(PINS.of_module(module).name)
    if sources is None:
        pytest.skip(f"the upstream of {module} is not installed here")
    return sources.text(module)


@pytest.mark.parametrize("patch", NAMED)
def test_a_patch_lies_where_its_target_does(patch):
    if patch.kind in MODULE_KINDS:
        pytest.skip("it belongs to a module and not to a place in it")
    package, _, place = patch.declared_in.partition(".")
    mirrored = [
        f"{each}.{place}"
        for upstream in PINS.upstreams
        if upstream.patch_package == package
        for each in upstream.packages
    ]
    if not PINS.of_module(patch.module).patch_package:
        assert mirrored, "what belongs to an unpatched upstream lies where the need for it is"
    else:
        assert any(within(place, patch.module) for place in mirrored), f"it should be at one of {mirrored}"


@pytest.mark.parametrize("patch", LATER)
def test_later_patch_lies_at_its_targets_path(patch):
    assert patch.declared_in == f"verl_plugin.patches.{patch.module}"


@pytest.mark.parametrize("patch", NAMED + LATER)
def test_a_patch_says_where_it_stands_upstream(patch):
    assert standing.complaint(patch.upstream) is None, patch.upstream


@pytest.mark.parametrize(
    "upstream",
    [
        "",
        "fixed upstream",
        "https://github.com/verl-project/verl",
        "https://github.com/verl-project/verl/pull/",
        "not forwarded: ",
        "not forwarded: later verl releases have it",
        "not forwarded: vLLM returns them since a while",
        "docs/upstream/of-nothing.md",
        "docs/upstream/README.md",
    ],
)
def test_text_without_the_statement_detected(upstream):
    assert standing.complaint(upstream) is not None


def test_every_draft_belongs_to_a_patch_or_a_module():
    """Subclasses of the plugin, the rehearsal and the emulator also repair or meet defects; they name the draft."""
    drafts = {f"{DRAFTS}{file.name}" for file in (REPOSITORY / DRAFTS).glob("*.md") if file.name != "README.md"}
    named = {patch.upstream for patch in (*PATCHES, *LATER_PATCHES) if patch.upstream.startswith(DRAFTS)}
    places = ("verl_plugin/**/*.py", "rehearsal/**/*.py", "npu_emulator/csrc/*.cpp")
    for file in (file for place in places for file in REPOSITORY.glob(place)):
        named |= set(re.findall(rf"{re.escape(DRAFTS)}[\w-]+\.md", file.read_text()))
    assert drafts == named
    assert [standing.complaint(draft) for draft in drafts] == [None] * len(drafts)


def test_every_draft_is_in_the_list():
    listed = re.findall(r"^\| \[([\w-]+)\]\(\1\.md\) \| (?:2025|2026|both) \| .+ \|$", INDEX.read_text(), re.MULTILINE)
    drafts = sorted(file.stem for file in INDEX.parent.glob("*.md") if file != INDEX)
    assert listed == drafts


def test_every_draft_says_what_where_and_how():
    """Version, function, what this project does instead, a reproduction with its output, and a change."""
    for file in INDEX.parent.glob("*.md"):
        text = file.read_text()
        if file == INDEX:
            continue
        assert re.search(r"^\| (?:Package|Packages) \| .*\d", text, re.MULTILINE), file
        assert re.search(r"^\| (?:Patch(?:es)?|Subclass(?:es)?)? ?[Hh]ere \| .+ \|$", text, re.MULTILINE), file
        assert "\n## Reproduction\n" in text and "\n## Proposed change\n" in text, file
        assert re.search(r"^    \S|```diff", text, re.MULTILINE), f"{file} has no output of a run"


def test_the_document_is_current():
    assert DOCUMENT.read_text() == document(PATCHES, PINS), "run `python -m overlay update`"
    later = DOCUMENT.with_name("patches-2026.md").read_text()
    assert later == document(LATER_PATCHES, LATER_PINS), "run `python -m overlay update --stack 2026`"


def test_locks_have_every_release_of_later_patches():
    """An installed release that is not in the lock would be taken for unknown source."""
    lock = Lock.read(DOCUMENT.parents[1] / "overlay" / LATER_PINS.lock_name)
    assert lock.targets.keys() == {target for patch in LATER_PATCHES for target in depends_on(patch)}
    for target, locked in lock.targets.items():
        upstream = LATER_PINS.of_module(target.partition(":")[0])
        assert locked.keys() == {upstream.cluster_label, upstream.release}, target


def test_the_lock_is_current_for_what_is_installed():
    releases = [
        (each, each.release, sources_of(each.name)) for each in PINS.upstreams if each.patch_package and each.release
    ]
    if any(sources is None or f" {upstream.release} " not in sources.origin for upstream, _, sources in releases):
        pytest.skip("not all pinned releases are installed here")
    old = Lock.read()
    lock, _ = checking.generate(PATCHES, PINS, releases, old)
    assert lock == old, "run `python -m overlay update`"


def test_the_check_of_what_is_installed_is_clean():
    if any(
        sources_of(upstream.name) is None for upstream in PINS.upstreams if upstream.patch_package and upstream.release
    ):
        pytest.skip("not all upstreams are installed here")
    command = [sys.executable, "-m", "overlay", "check", "--json"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    answer = json.loads(result.stdout)
    assert answer["exit"] == 0 and len(answer["checked"]) >= 4


def test_the_check_rejects_what_it_cannot_read():
    for given, message in [
        ("verl=/nowhere", "no package verl in /nowhere"),
        ("verl=/nowhere@abc", "git has no abc"),
        ("verl", "Set it to NAME=PATH"),
        ("nobody=/", "'nobody' is not an upstream"),
    ]:
        command = [sys.executable, "-m", "overlay", "check", "--upstream", given]
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 2 and message in result.stderr


@pytest.mark.parametrize("patch", CHANGED)
def test_every_mutation_of_a_target_is_distinguished(patch):
    content, lock, upstream = source_of(patch.module), Lock.read(), PINS.of_module(patch.module)
    applied = 0
    for mutation, expected in mutations.EXPECTED.items():
        changed = mutations.mutated(content, patch.qualified_name, mutation)
        if changed is None:
            continue
        alone = Sources("mutated", {patch.module: (changed, False)})
        verdicts = checking.check([patch], lock, PINS, upstream, alone)
        statuses = {verdict.status for verdict in verdicts if verdict.target == patch.target}
        assert statuses <= expected and statuses, (mutation.__name__, verdicts)
        applied += 1
    assert applied >= 2, "reformatting and changing the body apply to everything"


@cache
def shapes_of(module):
    return restating.shapes(source_of(module).decode())


@pytest.mark.parametrize("patch", NAMED)
def test_no_patch_restates_its_target(patch):
    if patch.kind == "provide":
        pytest.skip("its target does not exist upstream")
    ours = restating.shapes(inspect.getsource(sys.modules[patch.declared_in]))
    shared = restating.longest_shared_run(ours, shapes_of(patch.module))
    assert len(shared) < 6, f"{patch.describe()} shares these lines with its target:\n" + "\n".join(shared)


def test_no_patch_file_restates_the_module_it_mirrors():
    compared = 0
    for upstream in (each for each in PINS.upstreams if each.patch_package and sources_of(each.name)):
        for folder in package_folders(upstream.patch_package):
            for file in folder.rglob("*.py"):
                place = ".".join(file.relative_to(folder).with_suffix("").parts)
                for module in (f"{package}.{place}" for package in upstream.packages):
                    if sources_of(upstream.name).has(module) and not place.startswith("features."):
                        shared = restating.longest_shared_run(restating.shapes(file.read_text()), shapes_of(module))
                        assert len(shared) < 6, f"{file} restates {module}:\n" + "\n".join(shared)
                        compared += 1
    assert compared > 20 or any(sources_of(each.name) is None for each in PINS.upstreams if each.release)


def test_restated_function_detected_despite_new_names():
    upstream = "def f(a, b):\n    import os\n" + "".join(f"    v{i} = call(a, {i}, 'x{i}')\n" for i in range(6))
    copied = "def mine(left, right):\n    '''Ours.'''\n" + "".join(
        f"    n = go(left,  9, 'y')  # {i}\n" for i in range(6)
    )
    shared = restating.longest_shared_run(restating.shapes(upstream), restating.shapes(copied))
    assert len(shared) == 7
    other = restating.shapes("def f(a, b):\n    return sum(a) + b")
    assert len(restating.longest_shared_run(restating.shapes(upstream), other)) == 1


def missing_types(source: str) -> list[str]:
    """Return a file's imports for annotations that the upstream installed here does not define."""
    branches = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    missing = []
    for node in (node for branch in branches for node in branch.body if isinstance(node, ast.ImportFrom)):
        upstream = PINS.of_module(node.module)
        if upstream and upstream.patch_package and (sources := sources_of(upstream.name)):
            tree = ast.parse(sources.text(node.module) or b"")
            names = [alias.name for alias in node.names if find_definition(tree, alias.name) is None]
            missing += [f"{node.module}.{name}" for name in names]
    return missing


def test_no_patch_is_declared_in_a_loop():
    files = [file for _, file in [*patch_files(PINS.patch_packages()), *patch_files(LATER_PINS.patch_packages())]]
    bodies = {str(file): ast.parse(file.read_text()).body for file in files}
    assert len(bodies) > 50
    assert [file for file, body in bodies.items() if any(isinstance(each, ast.For | ast.While) for each in body)] == []


def test_upstream_has_the_types_of_the_patches():
    files = {file: file.read_text() for _, file in patch_files(PINS.patch_packages())}
    assert sum("if TYPE_CHECKING:" in source for source in files.values()) > 20
    assert {str(file): missing for file, source in files.items() if (missing := missing_types(source))} == {}


def test_type_unknown_to_upstream_detected():
    if sources_of("vllm") is None:
        pytest.skip("vllm is not installed here")
    source = "if TYPE_CHECKING:\n    from vllm.config import ModelConfig, Modelconfig\n    from vllm.no import Thing\n"
    assert missing_types(source) == ["vllm.config.Modelconfig", "vllm.no.Thing"]


def test_every_upstream_that_can_be_installed_is_searched_for():
    found = [
        upstream.name
        for upstream in PINS.upstreams
        if upstream.release and importlib.util.find_spec(upstream.packages[0])
    ]
    assert all(sources_of(name) is not None for name in found)
