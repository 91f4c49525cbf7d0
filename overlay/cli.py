"""The command line: what the patches are, without importing any upstream."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from overlay.declaration import Patch
from overlay.discovery import load
from overlay.errors import OverlayError
from overlay.ordering import make_plan
from overlay.pins import Pins


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0 done, 2 the patches or the arguments are wrong."""
    options = _parser().parse_args(arguments)
    try:
        pins = Pins.read()
        patches = make_plan(load(pins.rooms())).patches
    except OverlayError as error:
        print(error, file=sys.stderr)
        return 2
    return options.run(patches, pins, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m overlay", description="The patches of this overlay.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="one line a patch, in the order in which they are applied")
    listing.add_argument("--json", action="store_true", help="all metadata as a JSON list")
    listing.set_defaults(run=_list)
    explain = commands.add_parser("explain", help="everything that is declared about one patch")
    explain.add_argument("name", help="a target, a target@feature, or a part of one")
    explain.add_argument("--json", action="store_true", help="the same as a JSON list")
    explain.set_defaults(run=_explain)
    return parser


def _list(patches: tuple[Patch, ...], pins: Pins, options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps([as_dict(patch) for patch in patches], indent=2))
        return 0
    width = max((len(patch.kind) for patch in patches), default=0)
    feature_width = max((len(patch.feature) for patch in patches), default=0)
    for patch in patches:
        print(f"{patch.kind:{width}}  {patch.feature:{feature_width}}  {patch.target}")
    return 0


def _explain(patches: tuple[Patch, ...], pins: Pins, options: argparse.Namespace) -> int:
    exact = [patch for patch in patches if options.name in (patch.name, patch.label)]
    found = exact or [patch for patch in patches if options.name in patch.label]
    if not found:
        print(f"no patch is named {options.name!r}; `python -m overlay list` names them all", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([as_dict(patch) for patch in found], indent=2))
        return 0
    for patch in found:
        upstream = pins.of_module(patch.module)
        print(f"{patch.name}")
        for key, value in as_dict(patch).items():
            if key != "name" and value:
                print(f"  {key.replace('_', ' ')}: {', '.join(value) if isinstance(value, list) else value}")
        if upstream is not None:
            print(f"  supported: {upstream.supported()}")
    return 0


def as_dict(patch: Patch) -> dict[str, Any]:
    """A patch's declaration as plain data."""
    keys = ("name", "kind", "feature", "why", "upstream", "remove_when", "switch", "evidence", "only_here", "line")
    listed = {"relies_on": list(patch.relies_on), "after": list(patch.after)}
    return {key: getattr(patch, key) for key in keys} | listed | {"declared_in": patch.declared_in}
