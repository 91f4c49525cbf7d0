#!/usr/bin/env python3
"""Write the metadata that installing a distribution from its checkout would leave: its version and plugins.

The packages in the workspace are not installed. vLLM finds its platform by an entry point of vLLM-Ascend, and verl asks
for vLLM's version; importlib.metadata looks for both in the folders of sys.path, and so in the workspace.
"""

import argparse
import ast
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path


def entry_points(checkout: Path) -> dict[str, list[str]]:
    """Return entry points by group as a checkout's pyproject.toml or setup.py declares them: `name = module:object`."""
    found: dict[str, list[str]] = {}
    project = checkout / "pyproject.toml"
    if project.is_file():
        declared = tomllib.loads(project.read_text()).get("project", {}).get("entry-points", {})
        found |= {group: [f"{name} = {target}" for name, target in of.items()] for group, of in declared.items()}
    setup = checkout / "setup.py"
    if setup.is_file():
        for node in ast.walk(ast.parse(setup.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "entry_points":
                found |= ast.literal_eval(node.value)
    return found


def write_metadata(name: str, version: str, groups: Mapping[str, list[str]], folder: Path) -> Path:
    """Write NAME-VERSION.dist-info into `folder` and return its path."""
    target = folder / f"{name}-{version}.dist-info"
    target.mkdir()
    (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    sections = (f"[{group}]\n" + "".join(f"{entry}\n" for entry in entries) for group, entries in groups.items())
    (target / "entry_points.txt").write_text("\n".join(sections))
    return target


def main(arguments: list[str] | None = None) -> int:
    """Write the metadata and print the folder's name; return 2 if the checkout lacks a group that --needs names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="the package's name, such as vllm_ascend")
    parser.add_argument("version")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("folder", type=Path, help="folder for the metadata")
    parser.add_argument("--needs", help="a group of entry points that must exist")
    options = parser.parse_args(arguments)
    groups = entry_points(options.checkout)
    if options.needs and not groups.get(options.needs):
        print(f"error: {options.checkout} declares no entry point {options.needs} in setup.py", file=sys.stderr)
        return 2
    print(write_metadata(options.name, options.version, groups, options.folder).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
