"""The arrows of the architecture: what each part may import, at module level and inside functions.

overlay        the standard library and itself
npu_emulator   nothing of ours
features       no upstream at module level, and of ours only features and overlay's Feature with what it needs
patch files    at module level only the standard library, overlay and the rooms
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay.discovery import patch_files
from overlay.pins import Pins, within

REPOSITORY = Path(__file__).resolve().parents[1]
PINS = Pins.read()
ROOMS = tuple(room for room in PINS.rooms() if (REPOSITORY / room).is_dir())
UPSTREAMS = tuple(package for upstream in PINS.upstreams if upstream.room for package in upstream.packages)
OURS = ("overlay", "npu_emulator", "scripts", "tests", *ROOMS)
FEATURES = "verl_patches.features"
FOR_FEATURES = ("overlay.Feature", "overlay.ConfigurationError", "overlay.SettingsError", "overlay.configuration")


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[str, bool]]:
    """The modules that a source imports, each with whether that happens when the source itself is imported."""
    parents = module.split(".") if is_package else module.split(".")[:-1]

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            yield from ((f"{origin}.{alias.name}", at_import) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or typing_only
            yield from visit(child, at_import and not later)

    yield from visit(ast.parse(source), True)


def modules(folder: str) -> list[tuple[str, Path]]:
    """All modules below a folder of the repository; built copies and links left out."""
    files = sorted(file for file in (REPOSITORY / folder).rglob("*.py") if "build" not in file.parts)
    return [(".".join(file.relative_to(REPOSITORY).with_suffix("").parts), file) for file in files]


def violations(found: list[tuple[str, Path]], forbidden) -> list[str]:
    """Every import for which `forbidden(name, at_import)` holds."""
    lines = []
    for module, file in found:
        is_package = file.name == "__init__.py"
        name = module.removesuffix(".__init__")
        for imported, at_import in imports(file.read_text(), name, is_package):
            if forbidden(imported, at_import):
                lines.append(f"{module} imports {imported}")
    return lines


def is_any(name: str, packages: tuple[str, ...]) -> bool:
    return any(within(name, package) for package in packages)


def outside_overlay(name: str, at_import: bool) -> bool:
    return name.partition(".")[0] not in (*sys.stdlib_module_names, "overlay")


def ours(name: str, at_import: bool) -> bool:
    return is_any(name, tuple(part for part in OURS if part != "npu_emulator"))


def back_from_features(name: str, at_import: bool) -> bool:
    if at_import and is_any(name, UPSTREAMS):
        return True
    return is_any(name, OURS) and not is_any(name, (FEATURES, *FOR_FEATURES))


def heavy_in_patch_file(name: str, at_import: bool) -> bool:
    return at_import and name.partition(".")[0] not in (*sys.stdlib_module_names, "overlay", *ROOMS)


def test_overlay_imports_only_the_standard_library():
    assert modules("overlay") and violations(modules("overlay"), outside_overlay) == []


def test_overlay_names_no_upstream():
    named = [
        f"{module}: {upstream}"
        for module, file in modules("overlay")
        for upstream in UPSTREAMS
        if re.search(rf"\b{upstream}\b", file.read_text().lower())
    ]
    assert named == []


def test_the_emulator_imports_nothing_of_ours():
    assert violations(modules("npu_emulator"), ours) == []


def test_features_import_no_upstream_at_module_level_and_nothing_back():
    found = modules("verl_patches/features")
    assert found and violations(found, back_from_features) == []


def test_patch_files_import_nothing_heavy_at_module_level():
    found = list(patch_files(ROOMS))
    assert found and violations(found, heavy_in_patch_file) == []


@pytest.mark.parametrize(
    "source, rule, caught",
    [
        ("import numpy", outside_overlay, True),
        ("def f():\n    from verl.utils import x", outside_overlay, True),
        ("from . import errors", outside_overlay, False),
        ("from overlay import wrap", ours, True),
        ("import npu_emulator.meters", ours, False),
        ("from megatron.core import parallel_state", back_from_features, True),
        ("def f():\n    from megatron.core import parallel_state", back_from_features, False),
        ("if TYPE_CHECKING:\n    import verl", back_from_features, False),
        ("def f():\n    from verl_patches.workers import x", back_from_features, True),
        ("from verl_patches.features.reshard import plan", back_from_features, False),
        ("from overlay import Feature", back_from_features, False),
        ("from overlay import wrap", back_from_features, True),
        ("class C:\n    import torch", heavy_in_patch_file, True),
        ("def f():\n    import torch", heavy_in_patch_file, False),
        ("from verl_patches import features", heavy_in_patch_file, False),
    ],
)
def test_each_rule_catches_what_it_is_for(tmp_path, source, rule, caught):
    file = tmp_path / "sample.py"
    file.write_text(source)
    assert bool(violations([("overlay.sample", file)], rule)) == caught
