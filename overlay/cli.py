"""The command line: lists the patches and checks them against upstream's source, without importing upstream."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overlay import check as checking
from overlay.configuration import defaults
from overlay.declaration import Patch, patches_of
from overlay.discovery import load, load_features, load_middleware
from overlay.documentation import DOCUMENT, document, history_document, history_lines
from overlay.errors import OverlayError
from overlay.feature import Feature
from overlay.history import History, fates, walk
from overlay.lock import LOCK_FILE, Lock
from overlay.ordering import make_plan
from overlay.pins import PINS_FILE, Pins, Upstream
from overlay.sources import Sources, from_commit, from_folder, installed
from overlay.update import generate

Patches = Sequence[Patch]
_PROGRESS_S = 2.0


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0 done and clean, 1 drift, 2 wrong arguments or could not verify."""
    options = _parser().parse_args(arguments)
    try:
        pins = Pins.read(options.pins, options.stack)
        options.lock = options.lock or options.pins.with_name(pins.lock_name)
        return options.run(make_plan(load(pins.patch_packages())).patches, pins, options)
    except OverlayError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m overlay",
        description="List, explain and check the patches of an overlay.",
        epilog=_example("explain reshard"),
        formatter_class=_help_format,
    )
    parser.add_argument(
        "--pins", type=Path, default=PINS_FILE, metavar="FILE", help="the upstreams (default: pins.toml of the engine)"
    )
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help=f"the fingerprints (default: {LOCK_FILE.name} beside the pins)"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = _command(commands, _list, "print one line per patch, in the order of application", "list --json")
    explain = _command(commands, _explain, "print every declaration of a patch or a feature", "explain reshard")
    explain.add_argument("name", metavar="NAME", help="a feature, a target, target@feature, or a part of one")
    check = _command(
        commands,
        _check,
        "check whether upstream's source fits the patches; it is parsed, not imported",
        "check --stack 2026 --upstream NAME=CHECKOUT",
    )
    lock = _command(
        commands,
        _lock,
        "write the lock of fingerprints from all sources at hand",
        "lock --upstream NAME=CHECKOUT@COMMIT",
    )
    update = _command(
        commands,
        _update,
        "write all generated files: the lock, the table, and the project's own",
        "update --upstream NAME=CHECKOUT@COMMIT",
    )
    for command in (listing, explain, check):
        command.add_argument("--json", action="store_true", help="print JSON")
    for command in (check, lock, update):
        command.add_argument(
            "--upstream",
            action="append",
            default=[],
            metavar="NAME=DIR[@COMMIT]",
            help="a folder with the packages, or a commit of a git repository (default: the installed packages)",
        )
    _add_bisect(commands)
    _command(commands, _pins, "print package, repository, commit and reference of each pin, tab-separated", "pins")
    docs = _command(commands, _docs, "write the table of features and patches", "docs --to FILE")
    docs.add_argument("--to", type=Path, metavar="FILE", help=f"default: {DOCUMENT.name} beside the pins")
    update.set_defaults(to=None)
    return parser


def _add_bisect(commands: Any) -> None:
    bisect = _command(
        commands,
        _bisect,
        "find the first commits of an upstream that change and that break each patch",
        "bisect --upstream NAME=CHECKOUT A..B",
    )
    bisect.add_argument("--upstream", required=True, metavar="NAME=DIR", help="a git repository with its history")
    bisect.add_argument("range", nargs="?", default="", metavar="COMMIT..COMMIT", help="default: from the pin to HEAD")
    form = bisect.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a Markdown document")


def _help_format(prog: str) -> argparse.HelpFormatter:
    """Return the format of the help texts: at most 80 columns, with the examples as they are written."""
    # argparse leaves the last two columns free.
    width = min(shutil.get_terminal_size().columns, 80) - 2
    return argparse.RawDescriptionHelpFormatter(prog, width=width)


def _example(arguments: str) -> str:
    return f"Example:\n    python -m overlay {arguments}"


def _command(commands: Any, run: Any, summary: str, example: str) -> argparse.ArgumentParser:
    """Add the command that `example` begins with."""
    command = commands.add_parser(
        example.split()[0],
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_example(example),
        formatter_class=_help_format,
    )
    command.add_argument("--stack", default="", metavar="NAME", help="a stack of the pins (default: the pins' own)")
    command.set_defaults(run=run)
    return command


def _list(patches: Patches, pins: Pins, options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps([as_dict(patch) for patch in patches], indent=2))
        return 0
    width = max((len(patch.kind) for patch in patches), default=0)
    feature_width = max((len(patch.feature.name) for patch in patches), default=0)
    for patch in patches:
        print(f"{patch.kind:{width}}  {patch.feature.name:{feature_width}}  {patch.target}")
    return 0


def _explain(patches: Patches, pins: Pins, options: argparse.Namespace) -> int:
    features = [each for each in load_features(pins.patch_packages()) if each.name == options.name]
    exact = [patch for patch in patches if options.name in (patch.name, patch.label)]
    found = exact or [patch for patch in patches if options.name in patch.label and not features]
    if not found and not features:
        print(f"no patch has the name {options.name!r}. `python -m overlay list` lists them", file=sys.stderr)
        return 2
    described = [feature_as_dict(feature, pins) for feature in features] + [as_dict(patch) for patch in found]
    if options.json:
        print(json.dumps(described, indent=2))
        return 0
    for each in described:
        print(each["name"])
        for key, value in each.items():
            if key != "name" and value:
                print(f"  {key.replace('_', ' ')}: {', '.join(value) if isinstance(value, list) else value}")
        upstream = pins.of_module(each["name"].partition(":")[0])
        if upstream is not None:
            print(f"  supported: {upstream.supported()}")
    return 0


def feature_as_dict(feature: Feature, pins: Pins) -> dict[str, Any]:
    """Return a feature's declaration as plain data, with the lists of middleware that it is in."""
    keys = {"name": feature.name, "purpose": feature.purpose, "switch": feature.switch}
    section = defaults(feature.settings) if feature.settings else {}
    configuration = [f"{feature.section}.{name}={value}" for name, value in section.items()]
    configuration += [f"{key.path}={json.dumps(key.default)}" for key in feature.keys]
    middleware = [name for name in pins.middleware if feature in load_middleware([name])]
    patches = [patch.name for patch in patches_of(feature)]
    return keys | {"configuration": configuration, "patches": patches, "middleware": middleware}


def as_dict(patch: Patch) -> dict[str, Any]:
    """Return a patch's declaration as plain data."""
    keys = ("why", "upstream", "remove_when", "switch", "evidence", "only_here", "line")
    head = {"name": patch.name, "kind": patch.kind, "feature": patch.feature.name}
    listed = {key: list(getattr(patch, key)) for key in ("relies_on", "after", "outside", "inside")}
    return head | {key: getattr(patch, key) for key in keys} | listed | {"declared_in": patch.declared_in}


def _check(patches: Patches, pins: Pins, options: argparse.Namespace) -> int:
    lock = Lock.read(options.lock)
    given = [_given(pins, text) for text in options.upstream]
    if not given:
        pins.require_environment()
    verdicts: list[checking.Verdict] = []
    shown = []
    for upstream, sources in [(each[0], each[2]) for each in given] or _installed(patches, pins):
        if sources is None:
            found = [
                checking.Verdict("", upstream.name, False, "UNVERIFIED", "not installed here, but patches need it")
            ]
        else:
            found = checking.check(patches, lock, pins, upstream, sources)
        verdicts += found
        origin = sources.origin if sources else "nowhere"
        shown.append({"upstream": upstream.name, "source": origin, "verdicts": [asdict(each) for each in found]})
    code = checking.exit_code(verdicts)
    if options.json:
        print(json.dumps({"exit": code, "checked": shown}, indent=2))
    else:
        _print_verdicts(shown, code)
    return code


def _print_verdicts(shown: list[dict[str, Any]], code: int) -> None:
    for part in shown:
        counts: dict[str, int] = {}
        print(f"{part['upstream']}: {part['source']}")
        for verdict in part["verdicts"]:
            counts[verdict["status"]] = counts.get(verdict["status"], 0) + 1
            if verdict["status"] != "OK":
                needs = f" (relied on by {verdict['patch']})" if verdict["relied_on"] else ""
                print(f"  {verdict['status']:10} {verdict['target']}{needs}: {verdict['detail']}")
            if verdict["copied_in"]:
                print(f"  copied     {verdict['target']} is copied on import by {', '.join(verdict['copied_in'])}")
        print("  " + (", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no patch"))
    print({0: "clean", 1: "drift", 2: "not everything could be verified"}[code])


def _lock(patches: Patches, pins: Pins, options: argparse.Namespace) -> int:
    releases = [_release(*_given(pins, text)) for text in options.upstream]
    for upstream, sources in _installed(patches, pins):
        if sources is not None and sources.origin.startswith(f"{upstream.distribution} {upstream.release} "):
            releases.append((upstream, upstream.release, sources))
    lock, problems = checking.generate(patches, pins, releases, Lock.read(options.lock))
    options.lock.write_text(lock.text(), encoding="utf-8")
    print(f"wrote {options.lock.name}: {len(lock.targets)} targets in {len(lock.modules)} modules")
    for problem in problems:
        print(f"  not locked: {problem}")
    return 0


def _bisect(patches: Patches, pins: Pins, options: argparse.Namespace) -> int:
    name, equals, checkout = options.upstream.partition("=")
    if not equals or not checkout:
        raise OverlayError(f"--upstream={options.upstream!r} is invalid. Set it to NAME=CHECKOUT")
    upstream = checking.upstream_named(pins, name)
    first, dots, last = (options.range or f"{upstream.commit}..HEAD").partition("..")
    if not (first and dots and last):
        raise OverlayError(
            f"the range {options.range!r} is invalid. Write FIRST..LAST; the pin of {name} is {upstream.commit}"
        )
    history = History.open(upstream, Path(checkout), first, last)
    with _progress() as report:
        found = fates(walk(patches, pins, history, report))
    if options.json:
        print(json.dumps([asdict(fate) for fate in found], indent=2))
    elif options.markdown:
        print(history_document(history, found), end="")
    else:
        for fate in found:
            print(*history_lines(fate), sep="\n")
    return checking.CLEAN_EXIT if all(fate.fits for fate in found) else checking.DRIFT_EXIT


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that takes a command's progress; the latest is printed to standard error every two seconds.

    Commands that take less print nothing.
    """
    latest, done = ["it begins"], threading.Event()

    def say() -> None:
        while not done.wait(_PROGRESS_S):
            print(f"bisect: {latest[0]}", file=sys.stderr, flush=True)

    def report(clause: str) -> None:
        latest[0] = clause

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    try:
        yield report
    finally:
        done.set()
        saying.join()


def _given(pins: Pins, text: str) -> tuple[Upstream, str, Sources]:
    name, equals, place = text.partition("=")
    if not equals or not place:
        raise OverlayError(f"--upstream={text!r} is invalid. Set it to NAME=PATH or NAME=PATH@COMMIT")
    upstream = checking.upstream_named(pins, name)
    path, _, commit = place.partition("@")
    if commit:
        return upstream, commit, from_commit(Path(path), commit, upstream.packages, upstream.folder)
    below = Path(path, upstream.folder)
    return upstream, "", from_folder(below if below.is_dir() else Path(path), upstream.packages)


def _release(upstream: Upstream, commit: str, sources: Sources) -> tuple[Upstream, str, Sources]:
    if not commit or commit not in (upstream.commit, upstream.commit[:8], upstream.reference):
        raise OverlayError(f"only pinned sources can be locked. Set {upstream.name}=PATH@{upstream.cluster_label}")
    return upstream, upstream.cluster_label, sources


def _installed(patches: Patches, pins: Pins) -> Iterator[tuple[Upstream, Sources | None]]:
    """Return the upstreams that patches need, each as it is installed here.

    An absent upstream without a release in a package index is left out: nobody can install it there.
    """
    for upstream in pins.upstreams:
        needed = {target.partition(":")[0] for patch in patches for target in (patch.target, *patch.relies_on)}
        if any(pins.of_module(module) == upstream for module in needed):
            sources = installed(upstream)
            if sources is not None or upstream.release:
                yield upstream, sources


def _pins(patches: Patches, pins: Pins, options: argparse.Namespace) -> int:
    for upstream in pins.upstreams:
        for package in upstream.packages if upstream.repository else ():
            print(package, upstream.repository, upstream.commit or "-", upstream.reference or "-", sep="\t")
    return 0


def _docs(patches: Patches, pins: Pins, options: argparse.Namespace) -> int:
    name = DOCUMENT.name if pins.is_default else f"{DOCUMENT.stem}-{pins.stack}{DOCUMENT.suffix}"
    own = DOCUMENT if options.pins == PINS_FILE else options.pins
    file = options.to or own.with_name(name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(document(patches, pins), encoding="utf-8")
    print(f"wrote {file}")
    return 0


def _update(patches: Patches, pins: Pins, options: argparse.Namespace) -> int:
    code = max(_lock(patches, pins, options), _docs(patches, pins, options))
    for succeeded, line in generate(pins.generated, options.pins.parent):
        print(line if succeeded else f"  not written: {line}")
        code = code if succeeded else checking.UNVERIFIED_EXIT
    return code
