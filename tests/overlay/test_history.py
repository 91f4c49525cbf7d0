"""The walk through an upstream's history on throw-away repositories, against a check of every single commit."""

import json
import random
import subprocess
import threading
from dataclasses import replace

import pytest

from overlay import check as checking
from overlay import cli
from overlay.documentation import history_document, history_lines
from overlay.drift import CLEAN
from overlay.history import History, HistoryError, fates, walk
from overlay.lock import Lock
from overlay.pins import Pins
from overlay.sources import from_commit
from tests.overlay.conftest import PINS, Workbench

ACME = replace(PINS.upstreams[0], repository="https://github.com/somebody/acme")
PINNED = Pins((ACME, PINS.upstreams[1]))
CORE = "def f(x):\n    return x\n\ndef helper():\n    return 1\n\nLIMIT = 4\n"
BREAKING = ("SIGNATURE", "MOVED", "MISSING", "CONFLICT")


def nothing(*_):
    return None


class Repository:
    """A git repository below the workbench's folder with one commit a call."""

    def __init__(self, bench: Workbench) -> None:
        self.bench, self.folder = bench, bench.folder
        self.git("init", "-q", "-b", "main")
        self.patches = [
            bench.patch("wrap", "acme.core:f", nothing, upstream="https://github.com/somebody-else/acme/pull/12"),
            bench.patch("wrap", "acme.core:LIMIT", nothing, relies_on=["acme.core:helper"]),
            bench.patch("add", "acme.core:extra", nothing),
            bench.patch("wrap", "other.core:f", nothing),
        ]

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.folder), "-c", "user.name=t", "-c", "user.email=t", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, subject: str, files: dict[str, str], removed: tuple[str, ...] = ()) -> str:
        """Commit written and removed files; returns the commit's hash."""
        for path in removed:
            (self.folder / path).unlink()
        self.bench.write(files)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", subject)
        return self.git("rev-parse", "HEAD")

    def history(self, first: str, last: str = "HEAD") -> History:
        return History.open(ACME, self.folder, first, last)

    def fates(self, first: str, last: str = "HEAD"):
        found = fates(walk(self.patches, PINNED, self.history(first, last)))
        return {fate.patch.removeprefix("acme.core:").removesuffix("@testing"): fate for fate in found}


@pytest.fixture
def repository(bench):
    return Repository(bench)


def test_the_first_commit_that_changes_and_the_first_that_breaks_are_named(repository):
    first = repository.commit("begin", {"acme/core.py": CORE, "acme/note.py": ""})
    repository.commit("say more of it", {"acme/core.py": CORE.replace("4", "4  # four")})
    body = repository.commit("double", {"acme/core.py": CORE.replace("return x", "return 2 * x")})
    signature = repository.commit("take y (#12)", {"acme/core.py": CORE.replace("f(x)", "f(x, y)")})
    repository.commit("another module", {"acme/note.py": "x = 1\n"})
    helper = repository.commit("count", {"acme/core.py": CORE.replace("return 1", "return 2") + "\nextra = 1\n"})
    found = repository.fates(first)
    assert set(found) == {"f", "LIMIT", "extra"}, "another upstream's patch has no part in it"
    f, limit, extra = found["f"], found["LIMIT"], found["extra"]
    assert (f.changed.commit.sha, f.changed.finding.status) == (body, "DRIFT")
    assert (f.broken.commit.sha, f.broken.finding.status) == (signature, "SIGNATURE")
    assert f.fixed.sha == signature and f.fits, "the last commit took both back"
    assert (limit.changed.commit.sha, limit.changed.target, limit.broken) == (helper, "acme.core:helper", None)
    assert not limit.fits and limit.fixed is None
    assert (extra.broken.commit.sha, extra.broken.finding.status) == (helper, "CONFLICT")


def test_what_moved_is_looked_for_in_the_whole_source(repository):
    first = repository.commit("begin", {"acme/core.py": CORE})
    moved = repository.commit("move", {"acme/new.py": CORE, "acme/core.py": "\n"})
    fate = repository.fates(first)["f"]
    assert (fate.broken.commit.sha, fate.broken.finding.detail) == (moved, "now acme.new:f")


def test_a_module_that_becomes_a_package_is_still_the_module(repository):
    first = repository.commit("begin", {"acme/core.py": CORE})
    repository.commit("a package", {"acme/core/__init__.py": CORE}, removed=("acme/core.py",))
    assert repository.fates(first)["f"].fits and repository.fates(first)["f"].changed is None
    gone = repository.commit("gone", {"acme/note.py": ""}, removed=("acme/core/__init__.py",))
    assert repository.fates(first)["f"].broken.commit.sha == gone


def test_a_merged_branch_counts_as_the_commit_that_merges_it(repository):
    first = repository.commit("begin", {"acme/core.py": CORE})
    repository.git("checkout", "-q", "-b", "side")
    repository.commit("on the side", {"acme/core.py": CORE.replace("return x", "return -x")})
    repository.git("checkout", "-q", "main")
    repository.commit("meanwhile", {"acme/note.py": ""})
    repository.git("merge", "-q", "--no-ff", "-m", "merge the side", "side")
    assert repository.fates(first)["f"].changed.commit.subject == "merge the side"


def test_a_release_branch_is_compared_with_the_line_that_it_left(repository):
    """The branch's own changes are not on the line; changes that it took from there are known from that commit on."""
    fork = repository.commit("begin", {"acme/core.py": CORE})
    repository.git("checkout", "-q", "-b", "release")
    own = CORE.replace("return 1", "return 10").replace("return x", "return 3 * x")
    pin = repository.commit("own and taken over", {"acme/core.py": own})
    repository.git("checkout", "-q", "main")
    repository.commit("came here first", {"acme/core.py": CORE.replace("return x", "return 3 * x")})
    broken = repository.commit("gone", {"acme/core.py": CORE.replace("def f", "def g")})
    history = repository.history(pin, "main")
    assert (history.base.sha, history.first.sha) == (fork, pin)
    found = repository.fates(pin, "main")
    assert found["f"].broken.commit.sha == broken and not found["f"].unknown
    assert list(found["LIMIT"].unknown) == ["acme.core:helper"] and not (found["LIMIT"].fits or found["LIMIT"].lost)
    document = history_document(history, list(found.values()))
    assert (
        f"its branch left it at {fork[:8]} (" in document
        and "not on this line: helper, which it relies on, is DRIFT in the last" in document
    )


def edited(draw: random.Random, text: str) -> str:
    """Make one random edit; some revert an earlier one."""
    edits = [
        lambda: text.replace("return x", draw.choice(["return -x", "return x  # x"])),
        lambda: text.replace("return -x", "return x"),
        lambda: text.replace("f(x)", draw.choice(["f(x, y)", "f(x: int)"])),
        lambda: text.replace("f(x, y)", "f(x)"),
        lambda: text.replace("def helper", draw.choice(["def other", "def helper"])),
        lambda: text.replace("LIMIT = 4", "LIMIT = 5"),
        lambda: text + "\nextra = 1\n",
        lambda: CORE,
    ]
    return draw.choice(edits)()


@pytest.mark.parametrize("seed", range(4))
def test_the_walk_agrees_with_a_check_of_every_commit(repository, seed):
    draw, text = random.Random(seed), CORE
    commits = [repository.commit("begin", {"acme/core.py": text})]
    for _ in range(12):
        text = edited(draw, text)
        commits.append(repository.commit("edit", {"acme/core.py": text, "acme/note.py": f"x = {draw.random()}\n"}))
    sources = [from_commit(repository.folder, commit, ACME.packages) for commit in commits]
    lock, _ = checking.generate(repository.patches, PINNED, [(ACME, "first", sources[0])], Lock())
    expected: dict[str, list[str | None]] = {}
    for commit, source in zip(commits, sources, strict=True):
        for verdict in checking.check(repository.patches, lock, PINNED, ACME, source):
            entry = expected.setdefault(verdict.patch, [None, None])
            entry[0] = entry[0] or (commit if verdict.status not in CLEAN else None)
            entry[1] = entry[1] or (commit if verdict.status in BREAKING else None)
    found = fates(walk(repository.patches, PINNED, repository.history(commits[0])))
    events = {
        fate.patch: [event.commit.sha if event else None for event in (fate.changed, fate.broken)] for fate in found
    }
    assert events == expected and any(any(pair) for pair in events.values())


def test_walk_reports_every_commit_before_it_is_read(repository):
    first = repository.commit("begin", {"acme/core.py": CORE})
    later = [repository.commit("edit", {"acme/core.py": f"{CORE}# {number}\n"}) for number in range(3)]
    said: list[str] = []
    walk(repository.patches, PINNED, repository.history(first), said.append)
    assert said[0] == f"reading acme at {first[:8]}"
    named = [clause for clause in said if clause.startswith("commit ")]
    assert [clause.split(": ")[0] for clause in named] == [f"commit {number} of 3" for number in (1, 2, 3)]
    assert all(commit[:8] in clause for commit, clause in zip(later, named, strict=True))


def test_progress_said_while_a_step_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_PROGRESS_S", 0.01)
    said = threading.Event()
    monkeypatch.setattr(cli, "print", lambda *words, **_: (print(*words), said.set()), raising=False)
    with cli._progress() as report:
        report("commit 1 of 3")
        said.clear()
        assert said.wait(60)
    assert "bisect: commit 1 of 3\n" in capsys.readouterr().out


@pytest.fixture
def command(repository, monkeypatch, capsys):
    """Run `python -m overlay` on the throw-away upstream; returns its exit code, output and error output."""
    bare = tuple(replace(upstream, patch_package="") for upstream in PINNED.upstreams)
    monkeypatch.setattr(cli.Pins, "read", lambda *_: replace(PINNED, upstreams=bare))
    monkeypatch.setattr(cli, "load", lambda packages: repository.patches[:3])

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["bisect", "--upstream", f"acme={repository.folder}", *arguments])
        return code, *capsys.readouterr()

    return run


def test_the_command_says_the_same_in_words_as_json_and_as_a_document(repository, command):
    first = repository.commit("begin", {"acme/core.py": CORE})
    assert command(f"{first}..HEAD")[0] == 0
    broken = repository.commit("take | y (#12)", {"acme/core.py": CORE.replace("f(x)", "f(x, y)")})
    code, words, _ = command(f"{first}..HEAD")
    assert code == 1 and f"breaks: {repository.git('log', '-1', '--format=%cs')} {broken[:8]} take | y" in words
    (f,) = [each for each in json.loads(command(f"{first}..HEAD", "--json")[1]) if "core:f@" in each["patch"]]
    assert (
        f["broken"]["commit"]["sha"] == broken == f["fixed"]["sha"] and f["changed"]["finding"]["status"] == "SIGNATURE"
    )
    document = command(f"{first}..HEAD", "--markdown")[1]
    assert "Of 3 patches 2 fit the last commit as they are, 0 have to be read and 1 cannot be applied." in document
    assert "take \\| y (#12): SIGNATURE" in document and "| never |" in document


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["HEAD"], "the range 'HEAD' is invalid. Write FIRST..LAST"),
        (["absent..HEAD"], "git log failed in"),
        (["--all..HEAD"], "'--all' is not a commit"),
        ([], "git log failed in"),  # the pin is not in this repository
        (["HEAD..HEAD", "--upstream", "acme"], "Set it to NAME=CHECKOUT"),
        (["HEAD..HEAD", "--upstream", "acne=."], "'acne' is not an upstream"),
        (["HEAD..HEAD", "--upstream", "other={folder}"], "no patch changes or relies on anything in other"),
        (["HEAD..HEAD", "--upstream", "acme=/absent"], "git log failed in /absent"),
    ],
)
def test_invalid_history_range_rejected(repository, command, arguments, sentence):
    repository.commit("begin", {"acme/core.py": CORE})
    separator = ["--"] if arguments[:1] == ["--all..HEAD"] else []
    code, output, error = command(*separator, *(each.format(folder=repository.folder) for each in arguments))
    assert (code, output) == (2, "") and sentence in error and error.count("\n") == 1


def test_histories_without_a_common_commit_rejected(repository):
    first = repository.commit("begin", {"acme/core.py": CORE})
    repository.git("checkout", "-q", "--orphan", "elsewhere")
    repository.commit("another beginning", {"acme/core.py": CORE})
    with pytest.raises(HistoryError, match="git merge-base failed"):
        repository.history(first)


def test_terminal_lines_omit_absent_events(repository):
    first = repository.commit("begin", {"acme/core.py": CORE})
    assert history_lines(repository.fates(first)["f"]) == ["acme.core:f@testing", "  changes: never"]
