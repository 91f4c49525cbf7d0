"""The check and the lock on throw-away upstreams, from a folder, a git commit and an installed package."""

import importlib
import json
import subprocess
from dataclasses import replace

import pytest

from overlay import DriftError
from overlay import check as checking
from overlay.engine import Engine
from overlay.lock import Lock
from overlay.ordering import make_plan
from overlay.sources import SourceError, from_commit, from_folder, installed
from tests.overlay.conftest import PINS

ACME = PINS.upstreams[0]
CORE = """
    LIMIT = 4
    def f(x, y=1):
        return x
    def helper(): return 1
    class Base:
        def inherited(self): return 1
    class Class(Base):
        def method(self, x):
            return x
"""


def nothing(*_):
    return None


@pytest.fixture
def acme(bench):
    bench.write(
        {"acme/core.py": CORE, "acme/user.py": "from .core import f\ndef use():\n    from acme.core import LIMIT"}
    )
    bench.patches = [
        bench.patch("wrap", "acme.core:f", nothing, relies_on=["acme.core:helper"]),
        bench.patch("wrap", "acme.core:Class.method", nothing),
        bench.patch("wrap", "acme.core:Class.inherited", nothing),
        bench.patch("wrap", "acme.core:LIMIT", nothing),
        bench.patch("add", "acme.core:extra", nothing),
        bench.patch("before_import", "acme.core", nothing),
    ]
    bench.lock, problems = checking.generate(bench.patches, PINS, [(ACME, "1.0", sources(bench))], Lock())
    assert problems == ["no source of acme 12345678 was given"]
    return bench


def sources(bench):
    return from_folder(bench.folder, ACME.packages)


def statuses(bench, edit=lambda text: text):
    file = bench.folder / "acme/core.py"
    if file.exists():
        file.write_text(edit(file.read_text()))
    verdicts = checking.check(bench.patches, bench.lock, PINS, ACME, sources(bench))
    return {verdict.target.removeprefix("acme.core:"): verdict for verdict in verdicts}


def unclean(verdicts):
    return {name: verdict.status for name, verdict in verdicts.items() if verdict.status != "OK"}


def test_the_locked_source_is_clean_and_its_copies_are_listed(acme):
    verdicts = statuses(acme)
    assert not unclean(verdicts) and len(verdicts) == 7 and checking.exit_code(verdicts.values()) == 0
    assert verdicts["f"].copied_in == ["acme.user"] and verdicts["LIMIT"].copied_in == []


def test_other_upstreams_are_left_to_their_own_check(acme):
    relied_on = ["other.core:g", "acme.core:helper"]
    patches = [acme.patch("wrap", "acme.core:f", nothing, relies_on=relied_on)]
    verdicts = checking.check(patches, acme.lock, PINS, ACME, sources(acme))
    assert [verdict.target for verdict in verdicts] == ["acme.core:f", "acme.core:helper"]


@pytest.mark.parametrize(
    "before, after, expected",
    [
        ("return x\ndef", "return x + 1\ndef", {"f": "DRIFT"}),
        ("f(x, y=1)", "f(x, y=1, z=2)", {"f": "SIGNATURE"}),
        ("f(x, y=1)", "f(x: int, y: int = 1)", {"f": "COSMETIC"}),
        ("def f(", "def renamed(", {"f": "MOVED"}),
        ("def helper", "def other", {"helper": "MOVED"}),
        ("helper(): return 1", "helper(): return 2", {"helper": "DRIFT"}),
        ("def method(self, x)", "def method(self, x, y)", {"Class.method": "SIGNATURE", "Class.inherited": "DRIFT"}),
        ("def method(self, x):\n        return x", "pass", {"Class.method": "MISSING", "Class.inherited": "DRIFT"}),
        ("LIMIT = 4", "LIMIT = 5", {"LIMIT": "DRIFT"}),
        ("LIMIT = 4", "LIMIT = 4\nextra = 1", {"extra": "CONFLICT"}),
        ("LIMIT = 4", "LIMIT = 4  # four\n\n", {}),
        ("def f(x, y=1):", 'def f(x, y=1):\n    """New."""', {}),
    ],
)
def test_every_change_is_distinguished(acme, before, after, expected):
    assert before in (acme.folder / "acme/core.py").read_text()
    verdicts = statuses(acme, lambda text: text.replace(before, after, 1))
    assert unclean(verdicts) == expected
    clean = set(expected.values()) <= {"COSMETIC"}
    assert checking.exit_code(verdicts.values()) == (0 if clean else 1)


def test_a_definition_that_went_to_another_module_is_found_there(acme):
    acme.write({"acme/new.py": CORE})
    verdicts = statuses(acme, lambda text: "")
    assert verdicts["Class.method"].detail == "now acme.new:Class.method"
    assert unclean(verdicts)["LIMIT"] == "MISSING"
    (acme.folder / "acme/core.py").unlink()
    assert statuses(acme)["f"].detail == "now acme.new:f" and unclean(statuses(acme))["acme.core"] == "MISSING"


def test_what_cannot_be_verified_is_never_clean(acme):
    assert unclean(statuses(acme, lambda text: text + "\ndef broken(:\n"))["f"] == "UNVERIFIED"
    acme.write({"acme/core.py": CORE})
    acme.lock = Lock()
    verdicts = statuses(acme)
    assert verdicts["f"].status == "UNVERIFIED" and checking.exit_code(verdicts.values()) == 2
    with pytest.raises(SourceError, match="no package acme"):
        from_folder(acme.folder / "acme/absent", ["acme"])
    with pytest.raises(SourceError, match="git has no abc"):
        from_commit(acme.folder, "abc", ["acme"])


def test_a_commit_a_folder_and_an_installed_package_read_the_same(acme):
    git = ["git", "-C", str(acme.folder), "-c", "user.name=t", "-c", "user.email=t"]
    for command in (["init", "-q"], ["add", "acme"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    committed = from_commit(acme.folder, "HEAD", ["acme"]).modules
    acme.write({"acme/later.py": ""})
    folder = sources(acme).modules
    assert committed == {name: entry for name, entry in folder.items() if name != "acme.later"}
    assert from_folder(acme.folder / "acme", ["acme"]).modules == folder == installed(ACME).modules
    assert installed(PINS.upstreams[1]) is None


def test_the_lock_survives_writing_and_keeps_releases_that_are_not_at_hand(acme, tmp_path):
    file = tmp_path / "lock.json"
    file.write_text(acme.lock.text())
    assert Lock.read(file) == acme.lock and Lock.read(tmp_path / "absent.json") == Lock()
    acme.write({"acme/core.py": CORE.replace("return x", "return -x")})
    cluster = (ACME, ACME.cluster_label, sources(acme))
    both, problems = checking.generate(acme.patches, PINS, [cluster], acme.lock)
    assert set(both.targets["acme.core:f"]) == {"1.0", "12345678"} and not problems
    assert both.targets["acme.core:f"]["1.0"] == acme.lock.targets["acme.core:f"]["1.0"]
    fewer, _ = checking.generate(acme.patches[1:2], PINS, [cluster], both)
    assert set(fewer.targets) == {"acme.core:Class.method"} and json.loads(fewer.text())["modules"].keys() == {
        "acme.core"
    }
    acme.lock = both
    assert not unclean(statuses(acme)) and not unclean(statuses(acme, lambda text: text.replace("-x", "x")))


def test_an_unknown_upstream_rejected():
    with pytest.raises(checking.UnknownUpstreamError, match="'acne' is not an upstream; pins.toml has acme, other"):
        checking.upstream_named(PINS, "acne")


def start(acme, patches, accepted=()):
    file = acme.folder / "lock.json"
    file.write_text(acme.lock.text())
    engine = Engine(make_plan(patches), replace(PINS, accept_drift=accepted), file)
    acme.engines.append(engine)
    engine.activate()
    return engine


def edit(acme, before, after):
    file = acme.folder / "acme/core.py"
    file.write_text(file.read_text().replace(before, after))


def test_drift_stops_the_process_that_meets_it_and_says_how_to_go_on(acme):
    edit(acme, "return x\ndef", "return 2 * x\ndef")
    engine = start(acme, acme.patches[:1])
    with pytest.raises(DriftError) as caught:
        importlib.import_module("acme.core")
    message = str(caught.value)
    for text in ("wrap of acme.core:f", "is DRIFT", "1.0", "python -m overlay check", "accept_drift", "Supported: "):
        assert text in message
    assert acme.examine(engine).problems == [message]


def test_drift_of_what_a_patch_relies_on_is_fatal_too(acme):
    edit(acme, "def helper()", "def helper(new)")
    start(acme, acme.patches[:1])
    with pytest.raises(DriftError, match=r"acme.core:helper is SIGNATURE: 1.0 have \(\), but here it is \(new\)"):
        importlib.import_module("acme.core")


def test_accepted_drift_is_applied_and_reported(acme):
    edit(acme, "return x\ndef", "return 2 * x\ndef")
    for accepted in ("acme.core:f", "*"):
        engine = start(acme, acme.patches[:1], (accepted,))
        importlib.import_module("acme.core")
        report = acme.examine(engine)
        assert report.applied == ["acme.core:f"] and "acme.core:f is DRIFT" in report.drift[0] and not report.problems


def test_accepting_the_drift_of_one_target_accepts_no_other(acme):
    edit(acme, "return x\ndef", "return 2 * x\ndef")
    start(acme, acme.patches[:1], ("acme.core:helper",))
    with pytest.raises(DriftError, match="acme.core:f is DRIFT"):
        importlib.import_module("acme.core")


def test_cosmetic_changes_and_unlocked_patches_only_leave_a_note(acme):
    edit(acme, "f(x, y=1)", "f(x: int, y=1)")
    unlocked = acme.patch("wrap", "acme.core:Base.inherited", nothing)
    engine = start(acme, [acme.patches[0], unlocked])
    importlib.import_module("acme.core")
    assert [note.split(" is ")[1].split(":")[0] for note in acme.examine(engine).drift] == ["COSMETIC", "UNVERIFIED"]


def test_the_supported_source_leaves_no_note(acme):
    engine = start(acme, acme.patches[:4])
    importlib.import_module("acme.core")
    assert len(acme.examine(engine).applied) == 4 and not acme.examine(engine).drift
