"""Choose the tests to run against a mutant in a file, those nearest to it first."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from tests.fast_tier import MOST_SECONDS_OF_A_FILE, measured

# The tests of the stack 2026, which need its environment, and the package that they alone test.
OTHER_TESTS, _PLUGIN = "tests/stack_2026", "verl_plugin"

# Tests to run, by the file's area, if those next to it do not kill the mutant.
_SWITCHES = "tests/overlay/test_real_switches.py"
AREAS: dict[str, tuple[str, ...]] = {
    "overlay": ("tests/overlay",),
    "megatron_patches": ("tests/megatron_patches", _SWITCHES, "tests/worker_processes"),
    "mindspeed_patches": ("tests/mindspeed_patches", _SWITCHES),
    "npu_emulator": ("tests/npu_emulator", "tests/worker_processes"),
    "post_training": ("tests/post_training", _SWITCHES, "tests/worker_processes"),
    "rehearsal": ("tests/rehearsal",),
    "scripts": ("tests/scripts",),
    _PLUGIN: (OTHER_TESTS,),
    "verl_patches": ("tests/verl_patches", _SWITCHES, "tests/worker_processes", "tests/rehearsal/test_rehearsal.py"),
    "vllm_ascend_patches": ("tests/vllm_ascend_patches", _SWITCHES, "tests/worker_processes"),
    "vllm_patches": ("tests/vllm_patches", _SWITCHES, "tests/worker_processes"),
}

# These read every file in the tree.
_EVERY_FILE = ("tests/test_dataclasses.py", "tests/test_function_lengths.py", "tests/test_import_contracts.py")

# A patch's tests name its target, not its file; configuration keys are tested by one document of all keys.
_KEYS = "tests/scripts/test_configuration_document.py"
# Tests of behaviour common to all programs find the programs by folder.
_COMMANDS = "tests/scripts/test_commands.py"
_DECLARES_KEYS = re.compile(r"^[A-Z_]+ = Feature\(|^class \w+\(KeyGroup\)", re.MULTILINE)
_DECLARES_A_PATCH = re.compile(r"^@(?:wrap|replace|add|register|before_import|provide)\(", re.MULTILINE)

_DEFINITIONS = (ast.FunctionDef, ast.ClassDef)

# The folder of the emulator's packages.
_SOURCES = ("npu_emulator", "src")

# Programs in these folders name every module; the tests that run them come last.
_ASKED_LAST = ("tests", "tests/worker_processes", "tests/demonstrations", "tests/mutations", "tests/upstream")


def tiers(file: str, root: Path) -> tuple[tuple[str, ...], ...]:
    """Return pytest selectors for a product file, tier by tier, in the order in which they are tried.

    1. The test of the same name, tests that name the module, effect tests if it declares patches, the document of
       keys if it declares any, tests of all programs if it is one, and tests of every file.
    2. The folder that mirrors the file's.
    3. The tests of the whole area.

    A tier that adds nothing is left out, and one with tests of both stacks is two, that of the file's stack first,
    because each stack has its environment. If no test names the module, the first tier has the mirrored folder and the
    tests that contain names defined by the module. If that is nothing at all, it has the area's cheap tests.
    """
    path = Path(file)
    source = (root / path).read_text(encoding="utf-8")
    near = {_SWITCHES} if _DECLARES_A_PATCH.search(source) else set()
    near |= {_KEYS} if _DECLARES_KEYS.search(source) else set()
    near |= {_COMMANDS} if path.parent == Path("scripts") else set()
    named, mirrored = {str(test) for test in _same_name(path, root)} | set(_naming(path, root)), _mirrored(path, root)
    near |= named or {*mirrored, *_using(path, root, mirrored)}
    near = near or set(_cheap(root / "tests" / path.parts[0], root))
    candidates = ((*sorted(near), *_EVERY_FILE), mirrored, AREAS[path.parts[0]])
    found: list[tuple[str, ...]] = []
    for tier in candidates:
        tier = tuple(selector for selector in tier if (root / selector).exists())
        for other in sorted((False, True), key=lambda other: other != _is_of_other_stack(path)):
            part = tuple(selector for selector in tier if of_other_stack([selector]) is other)
            if part and part not in found:
                found.append(part)
    return tuple(found)


def of_other_stack(selectors: Sequence[str]) -> bool:
    """Return whether tests belong to the stack 2026, which needs its own environment."""
    return any(selector == OTHER_TESTS or selector.startswith(f"{OTHER_TESTS}/") for selector in selectors)


def _is_of_other_stack(path: Path) -> bool:
    return path.parts[0] == _PLUGIN or path.parts[:2] == ("rehearsal", "stack_2026")


def _folder(path: Path, root: Path) -> Path:
    """Return the test folder that mirrors a file's.

    The emulator's packages are two folders deeper than their tests. The plugin's packages have a folder in that of the
    stack 2026, or share one.
    """
    if path.parts[:2] == _SOURCES:
        return Path("tests", "npu_emulator", *path.parent.parts[3:])
    if path.parts[0] == _PLUGIN:
        own = Path(OTHER_TESTS, *path.parent.parts[1:])
        return own if path.parent.parts[1:] and (root / own).is_dir() else Path(OTHER_TESTS, _PLUGIN)
    return Path("tests", *path.parent.parts)


def _same_name(path: Path, root: Path) -> list[Path]:
    """Return tests of the same name in the mirrored folder and those above it, up to the area's.

    In the mirrored folder the name may also have a suffix.
    """
    folder = _folder(path, root)
    found = sorted(each.relative_to(root) for each in (root / folder).glob(f"test_{path.stem}_*.py"))
    while len(folder.parts) > 1:
        if (root / folder / f"test_{path.stem}.py").exists():
            found.append(folder / f"test_{path.stem}.py")
        folder = folder.parent
    return found


def _mirrored(path: Path, root: Path) -> tuple[str, ...]:
    """Return the nearest test folder, from the file's mirror upwards, that has a test; () if that is the whole area."""
    folder = _folder(path, root)
    while len(folder.parts) > 2:
        if (root / folder).is_dir() and any((root / folder).rglob("test_*.py")):
            return (str(folder),)
        folder = folder.parent
    return ()


def _naming(path: Path, root: Path) -> list[str]:
    """Return the test files that name the module, directly or through a helper program that names it.

    A file names a module by its dotted name, by its path, or by importing it from its package.
    """
    files = {each.relative_to(root): each.read_text(encoding="utf-8") for each in (root / "tests").rglob("*.py")}
    files = {each: text for each, text in sorted(files.items()) if str(each.parent) not in _ASKED_LAST}
    pending, found = [path], set[Path]()
    while pending:
        module = pending.pop()
        for each, text in files.items():
            if each not in found and _names(text, module):
                found.add(each)
                if not each.stem.startswith("test_"):
                    pending.append(each)
    return sorted(str(each) for each in found if each.stem.startswith("test_"))


def _using(path: Path, root: Path, elsewhere: tuple[str, ...]) -> list[str]:
    """Return at most three test files that contain most of the names that a module defines or has as mapping keys.

    Methods count, and leading underscores are ignored: such a function may stand in for another one. Names of a single
    lower-case word are too common to count. Folders that are tried anyway are left out.
    """
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    defined = {node.name.strip("_") for body in bodies for node in body if isinstance(node, _DEFINITIONS)}
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    words = (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    defined |= {word for word in words if re.fullmatch(r"\w+", word)}
    telling = [re.compile(rf"\b{name}\b") for name in sorted(defined) if not re.fullmatch("[a-z]+", name)]
    held: dict[str, int] = {}
    for each in sorted((root / "tests").rglob("test_*.py")):
        test, text = str(each.relative_to(root)), each.read_text(encoding="utf-8")
        if not test.startswith(tuple(f"{folder}/" for folder in (*elsewhere, *_ASKED_LAST[1:]))):
            held[test] = sum(name.search(text) is not None for name in telling)
    return sorted((test for test, count in held.items() if count), key=lambda test: -held[test])[:3]


def _cheap(folder: Path, root: Path) -> list[str]:
    """Return the test files directly in a folder whose measured time is low."""
    files, seconds = (str(each.relative_to(root)) for each in sorted(folder.glob("test_*.py"))), measured()
    return [file for file in files if seconds.get(file, 0.0) <= MOST_SECONDS_OF_A_FILE]


def _names(text: str, path: Path) -> bool:
    """Return whether a text has a module's dotted name or its path, or imports it from its package."""
    if str(path) in text.replace('" / "', "/"):
        return True
    parts = [part for part in path.with_suffix("").parts if part != "__init__"]
    if path.parts[:2] == _SOURCES:
        parts = parts[2:]
    dotted = ".".join(parts) if len(parts) > 1 else f"import {parts[0]}"
    package = f"from {'.'.join(parts[:-1])} import "
    return any(dotted in line or (line.startswith(package) and parts[-1] in line) for line in text.splitlines())
