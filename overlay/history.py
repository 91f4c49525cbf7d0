"""Walk an upstream's history: the first commit that each patch does not survive. Source is read from git and parsed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from overlay import check as checking
from overlay.declaration import Patch
from overlay.drift import CLEAN, Status, TargetStatus
from overlay.errors import OverlayError
from overlay.lock import Lock
from overlay.pins import Pins, Upstream
from overlay.sources import Sources, from_commit, module_of

_PULL_REQUEST = re.compile(r"/([^/]+)/pull/(\d+)")
_FIELDS = "%H%x09%cs%x09%s"
_BREAKING: tuple[Status, ...] = ("SIGNATURE", "MOVED", "MISSING", "CONFLICT")


class HistoryError(OverlayError):
    """A range of commits that cannot be walked."""


@dataclass(frozen=True)
class Commit:
    """One commit of the upstream: its full hash, the day on which it was committed (ISO 8601) and its subject."""

    sha: str
    day: str
    subject: str


@dataclass(frozen=True)
class Event:
    """A commit, its index among the examined commits, and the state of a target after it."""

    commit: Commit
    place: int
    target: str
    finding: TargetStatus


@dataclass
class Course:
    """The course of one target of one patch along the history.

    Attributes:
        patch: the patch.
        target: its own target, or one that it relies on.
        known: false for a target that never had the form that the patch knows on this line of history, as when a
            release branch has its own form of it.
        changed: the first commit after which the target is not the one that the patch was written for: somebody has to
            read it.
        broken: the first commit after which the patch cannot be applied, or must not be: the target has another
            signature, has moved or is gone, or upstream has what the patch would add.
        last: the finding at the range's end.
        fixed: the commit of the pull request that the patch's declaration names, if this history holds it.
    """

    patch: Patch
    target: str
    known: bool = False
    changed: Event | None = None
    broken: Event | None = None
    last: TargetStatus = field(default_factory=lambda: TargetStatus("OK"))
    fixed: Commit | None = None


@dataclass(frozen=True)
class Fate:
    """The fate of one patch, named by its label: the first events among all its targets (see ``Course``).

    ``unknown`` are the targets that never had the form that the patch knows on this line of history. At the range's end
    the patch ``fits`` if all its targets have that form, and is ``lost`` if one of them keeps it from being applied.
    """

    patch: str
    changed: Event | None
    broken: Event | None
    unknown: dict[str, TargetStatus]
    fits: bool
    lost: bool
    fixed: Commit | None


@dataclass(frozen=True)
class History:
    """The commits of one line of history that follow ``base``: the first, or where a branch with the first left it."""

    upstream: Upstream
    repository: Path
    first: Commit
    base: Commit
    last: Commit

    @classmethod
    def open(cls, upstream: Upstream, repository: Path, first: str, last: str) -> History:
        """Open the history from one commit to another.

        Raises:
            HistoryError: git does not know a commit, or the two have no history in common.
        """
        ends = [_commit(repository, name) for name in (first, last)]
        shared = _git(repository, "merge-base", *(end.sha for end in ends))
        return cls(upstream, repository, ends[0], _commit(repository, shared.strip()), ends[1])

    @property
    def _below(self) -> str:
        """The prefix of git's paths before those of modules."""
        return f"{self.upstream.folder}/" if self.upstream.folder else ""

    def commits(self, paths: Sequence[str] = ()) -> Iterator[tuple[Commit, list[str]]]:
        """Yield the commits after ``base``, oldest first, each with those of the paths that it changes.

        Without paths, yield all commits, each with no paths. A merged branch counts as the one commit that merges it.
        """
        command = ["log", "--first-parent", "-m", "--reverse", "--no-renames", f"--format=%x00{_FIELDS}"]
        listed = ["--name-only"] if paths else []
        searched = [self._below + path for path in paths]
        text = _git(self.repository, *command, *listed, f"{self.base.sha}..{self.last.sha}", "--", *searched)
        for entry in text.split("\0")[1:]:
            head, *changed = entry.splitlines()
            yield _parse(head), [path.removeprefix(self._below) for path in changed if path]

    def sources(self, commit: Commit) -> Sources:
        """Return all modules of the upstream's packages at a commit."""
        return from_commit(self.repository, commit.sha, self.upstream.packages, self.upstream.folder)

    def content(self, commit: Commit, path: str) -> bytes | None:
        """Return a file's content at a commit; None if there is no such file."""
        command = ["git", "-C", str(self.repository), "cat-file", "blob", f"{commit.sha}:{self._below}{path}"]
        result = subprocess.run(command, capture_output=True, check=False)
        return result.stdout if result.returncode == 0 else None


def walk(
    patches: Iterable[Patch], pins: Pins, history: History, report: Callable[[str], None] = lambda _: None
) -> list[Course]:
    """Follow everything that the patches change or rely on in one upstream from the range's first commit to its last.

    The patches are assumed to fit the first commit; the lock is not consulted.

    Args:
        report: called often with a clause on the progress.

    Raises:
        HistoryError: no patch concerns this upstream.
        SourceError: a commit lacks the upstream's packages.
    """
    courses = [
        Course(patch, target)
        for patch in patches
        for target in dict.fromkeys((patch.target, *patch.relies_on))
        if pins.of_module(target.partition(":")[0]) == history.upstream
    ]
    if not courses:
        raise HistoryError(f"no patch changes or relies on anything in {history.upstream.name}")
    report(f"reading {history.upstream.name} at {history.first.sha[:8]}")
    first = history.sources(history.first)
    followed = [course.patch for course in courses]
    lock, _ = checking.generate(followed, pins, [(history.upstream, history.first.sha[:8], first)], Lock())
    report(f"listing the commits up to {history.last.sha[:8]}")
    _follow(courses, lock, history, report)
    report(f"reading {history.upstream.name} at {history.last.sha[:8]}")
    at_last = checking.Reader(history.sources(history.last))
    fixes = _fixes(history)
    for number, course in enumerate(courses, start=1):
        report(f"target {number} of {len(courses)} at the end of the range")
        course.last = checking.find(course.patch, course.target, lock, at_last)
        course.fixed = fixes.get(_named_pull_request(course.patch, history))
    return courses


def fates(courses: Iterable[Course]) -> list[Fate]:
    """Return the fate of each patch, given by the first events among all its targets, in the order of the courses."""
    grouped: dict[str, list[Course]] = {}
    for course in courses:
        grouped.setdefault(course.patch.label, []).append(course)
    return [
        Fate(
            patch=label,
            changed=_first(course.changed for course in group),
            broken=_first(course.broken for course in group),
            unknown={course.target: course.last for course in group if not course.known},
            fits=all(course.last.status in CLEAN for course in group),
            lost=any(course.last.status in _BREAKING for course in group),
            fixed=group[0].fixed,
        )
        for label, group in grouped.items()
    ]


def _first(events: Iterable[Event | None]) -> Event | None:
    return min(filter(None, events), key=lambda event: event.place, default=None)


def _follow(courses: Sequence[Course], lock: Lock, history: History, report: Callable[[str], None]) -> None:
    """Record for each course the first commits that change it and that break it.

    A course that is not known at the base may become known later: a release branch may have picked a commit of this
    line that follows the base.
    """
    concerned: dict[str, list[Course]] = {}
    for course in courses:
        concerned.setdefault(course.target.partition(":")[0], []).append(course)
    modules = {name: entry for name, entry in history.sources(history.base).modules.items() if name in concerned}
    reader = checking.Reader(Sources(history.base.sha, modules))
    for course in courses:
        course.known = checking.find(course.patch, course.target, lock, reader, elsewhere=False).status in CLEAN
    paths = [f"{module.replace('.', '/')}{ending}" for module in concerned for ending in (".py", "/__init__.py")]
    commits = list(history.commits(paths))
    for place, (commit, changed) in enumerate(commits):
        report(f"commit {place + 1} of {len(commits)}: {commit.sha[:8]} of {commit.day}")
        for path in changed:
            _bring_along(modules, path, history.content(commit, path))
        touched = {module_of(path)[0] for path in changed}
        reader, whole = checking.Reader(Sources(commit.sha, modules)), None
        for course in [each for module in sorted(touched) for each in concerned[module] if each.broken is None]:
            finding = checking.find(course.patch, course.target, lock, reader, elsewhere=False)
            if finding.status in CLEAN:
                course.known = True
            elif course.known and finding.status != "UNVERIFIED":
                if finding.status == "MISSING":  # what moved is looked for in the whole source
                    whole = whole or checking.Reader(history.sources(commit))
                    finding = checking.find(course.patch, course.target, lock, whole)
                event = Event(commit, place, course.target, finding)
                course.changed = course.changed or event
                course.broken = event if finding.status in _BREAKING else None


def _bring_along(modules: dict[str, tuple[bytes, bool]], path: str, content: bytes | None) -> None:
    """Update a module to its file's content after a commit; a module may become a package, or disappear."""
    name, is_package = module_of(path)
    if content is not None:
        modules[name] = (content, is_package)
    elif name in modules and modules[name][1] == is_package:
        del modules[name]


def _named_pull_request(patch: Patch, history: History) -> str:
    """Return the number of the pull request to this very upstream that the patch's declaration names, or ""."""
    found = _PULL_REQUEST.search(patch.upstream)
    own = history.upstream.repository.rpartition("/")[2].casefold()
    return found[2] if found and found[1].casefold() == own else ""


def _fixes(history: History) -> dict[str, Commit]:
    """Return commits by the pull request's number at the end of their subject, as GitHub writes it: ``... (#123)``."""
    numbered = ((re.search(r"\(#(\d+)\)$", commit.subject), commit) for commit, _ in history.commits())
    return {number[1]: commit for number, commit in numbered if number}


def _commit(repository: Path, name: str) -> Commit:
    if name.startswith("-") or not name:
        raise HistoryError(f"{name!r} is not a commit. Write FIRST..LAST with names that git knows")
    return _parse(_git(repository, "log", "-1", f"--format={_FIELDS}", name, "--"))


def _parse(line: str) -> Commit:
    sha, day, subject = line.strip().split("\t", 2)
    return Commit(sha, day, subject)


def _git(repository: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, check=False)
    if result.returncode != 0:
        said = (result.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise HistoryError(f"git {' '.join(arguments[:1])} failed in {repository}: {said}")
    return result.stdout.decode(errors="replace")
