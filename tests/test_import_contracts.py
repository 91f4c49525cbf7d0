"""Import rules of the architecture.

Each of import-linter's contracts in pyproject.toml detects the import that it forbids. The rules that they cannot
express are checked here:

overlay        imports only the standard library
post_training  imports no upstream at module level, except in Megatron's models, imported only where one is built
features       import no upstream at module level, and from overlay only Feature and what belongs to it
patch files    import at module level only the standard library, overlay, features and the patch packages
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx
import pytest

from overlay.discovery import patch_files
from overlay.pins import Pins, within

REPOSITORY = Path(__file__).resolve().parents[1]
PINS = Pins.read()
PATCH_PACKAGES = tuple(each for each in PINS.patch_packages() if (REPOSITORY / each).is_dir())
UPSTREAMS = tuple(package for upstream in PINS.upstreams if upstream.patch_package for package in upstream.packages)
FOR_FEATURES = (
    *(f"overlay.{name}" for name in ("Feature", "Key", "ConfigurationError", "DeclarationError", "SettingsError")),
    "overlay.read_settings_from",
    # The catalogue discovers the features, and settings are read into the classes that they declare.
    *(f"overlay.{name}" for name in ("configuration", "discovery.load_features", "pins.Pins")),
)
# MindSpeed patches upstream itself, and the patch engine must apply its patches on top.
LATE_CHANGES = ("overlay.unpatched", "overlay.aliases")
MODEL_CODE = ("post_training.models.megatron", "post_training.models.mindspeed")
SETTINGS = REPOSITORY / "pyproject.toml"
CONTRACTS = tomllib.loads(SETTINGS.read_text())["tool"]["importlinter"]["contracts"]
# An import that breaks each contract: file, line, name of the contract.
FORBIDDEN = [
    ("overlay/ordering.py", "import npu_emulator", "The patch engine stands alone"),
    ("npu_emulator/counters.py", "from overlay import Feature", "The emulated NPU stands alone"),
    ("post_training/reshard/plan.py", "import overlay", "What patches nothing knows no patches"),
    (
        "verl_patches/features/residency/storages.py",
        "import verl_patches.workers.megatron_workers",
        "Patch packages depend on features, and features on post_training",
    ),
    ("megatron_patches/core/jit.py", "import vllm_patches.utils", "Patch packages are independent of each other"),
    ("post_training/layouts/layout.py", "import post_training.models.qwen2", "No circle"),
    ("verl_plugin/megatron_core.py", "import verl_patches.utils", "The plugin knows no patches of the other stack"),
    ("vllm_patches/utils.py", "import tests.ranks", "What a user types needs no tests"),
    ("megatron_patches/core/jit.py", "import npu_emulator.meters", "The product knows an NPU and no emulator"),
]


def lint(folder: Path) -> str:
    """Return import-linter's output for the packages in a folder, with this repository's contracts."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo", "--config", SETTINGS]
    # Patch packages have no __init__.py: with the repository on the path too, its files would count as well.
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ended = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=600)
    assert "Contracts:" in ended.stdout, ended.stdout + ended.stderr
    return ended.stdout


def test_modules_import_each_other_in_no_cycle():
    """Imports inside functions count too, and those of a package's `__init__`, which the contract of siblings ignores.

    Self-imports are allowed: a function that Ray runs elsewhere imports its own module there.
    """
    packages = ["overlay", "post_training", "verl_plugin", "rehearsal", "scripts", "benchmarks", *PATCH_PACKAGES]
    found = grimp.build_graph(*packages, cache_dir=None, exclude_type_checking_imports=True)
    graph = networkx.DiGraph((by, of) for by in found.modules for of in found.find_modules_directly_imported_by(by))
    assert graph.number_of_nodes() > 500
    assert [cycle for cycle in networkx.simple_cycles(graph) if len(cycle) > 1] == []


def test_emulator_modules_import_each_other_in_no_cycle():
    """Read the sources, as the installed packages may be older."""
    sources = REPOSITORY / "npu_emulator" / "src"
    modules = {}
    for file in sources.rglob("*.py"):
        parts = file.relative_to(sources).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph = networkx.DiGraph()
    for module, file in modules.items():
        for name, _ in imports(file.read_text(), module, file.stem == "__init__"):
            of = name if name in modules else name.rpartition(".")[0]
            graph.add_edge(module, of)
    assert [*networkx.simple_cycles(graph)] == []
    assert {"npu_emulator.counters", "npu_emulator.engine"} <= {*graph.predecessors("npu_emulator.cann")}


def test_emulator_headers_include_each_other_in_no_cycle():
    sources = REPOSITORY / "npu_emulator" / "csrc"
    includes = {file.name: re.findall(r'#include "(.+)"', file.read_text()) for file in sources.glob("*.*")}
    graph = networkx.DiGraph((by, of) for by, included in includes.items() for of in included)
    assert graph.has_edge("graph.cpp", "streams.h")
    assert [*networkx.simple_cycles(graph)] == []


def test_every_contract_is_broken_by_the_import_that_it_forbids(tmp_path):
    assert sorted(name for _, _, name in FORBIDDEN) == sorted(contract["name"] for contract in CONTRACTS)
    packages = ["overlay", "post_training", "verl_plugin", "rehearsal", "scripts", "benchmarks", *PATCH_PACKAGES]
    sources = [REPOSITORY / package for package in packages]
    sources += [
        folder for folder in (REPOSITORY / "npu_emulator" / "src").iterdir() if (folder / "__init__.py").exists()
    ]
    for source in sources:
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.rmtree(tmp_path / "verl_patches" / "scripts")
    assert "0 broken" in lint(tmp_path)
    for file, line, _ in FORBIDDEN:
        changed = tmp_path / file
        changed.write_text(f"{changed.read_text()}\n{line}\n")
    said = lint(tmp_path)
    for _, _, name in FORBIDDEN:
        assert f"{name} BROKEN" in said, said


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the modules that a source imports, each with whether it does so when it is imported itself."""
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
    """Return all modules below a folder of the repository, without built copies."""
    files = sorted(file for file in (REPOSITORY / folder).rglob("*.py") if "build" not in file.parts)
    return [(".".join(file.relative_to(REPOSITORY).with_suffix("").parts), file) for file in files]


def violations(found: list[tuple[str, Path]], forbidden) -> list[str]:
    """Return every import for which `forbidden(name, at_import)` is true."""
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
    if name == "typing_extensions.TypeVar" and not at_import:  # type checkers provide it
        return False
    return name.partition(".")[0] not in (*sys.stdlib_module_names, "overlay")


def upstream_too_early(name: str, at_import: bool) -> bool:
    return at_import and is_any(name, (*UPSTREAMS, *MODEL_CODE))


def beyond_a_feature(name: str, at_import: bool) -> bool:
    if upstream_too_early(name, at_import):
        return True
    return within(name, "overlay") and not is_any(name, FOR_FEATURES)


def beyond_a_late_change(name: str, at_import: bool) -> bool:
    return beyond_a_feature(name, at_import) and name != "overlay" and not is_any(name, LATE_CHANGES)


def heavy_in_patch_file(name: str, at_import: bool) -> bool:
    return at_import and name.partition(".")[0] not in (*sys.stdlib_module_names, "overlay", *PATCH_PACKAGES)


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


def test_features_import_no_upstream_at_module_level_and_little_of_overlay():
    found = modules("verl_patches/features")
    late = [each for each in found if each[0] == "verl_patches.features.mindspeed.megatron_adaptor"]
    assert len(late) == 1 and violations(late, beyond_a_late_change) == []
    assert violations([each for each in found if each not in late], beyond_a_feature) == []


def test_post_training_imports_no_upstream_at_module_level_but_in_the_models_of_megatron():
    found = modules("post_training")
    models = [each for each in found if is_any(each[0], MODEL_CODE)]
    others = [each for each in found if each not in models]
    assert models and others and violations(others, upstream_too_early) == []


def test_model_code_is_imported_only_where_a_model_is_built():
    found = [each for folder in (*PATCH_PACKAGES, "rehearsal", "scripts") for each in modules(folder)]
    assert violations(found, lambda name, at_import: at_import and is_any(name, MODEL_CODE)) == []


def test_patch_files_import_nothing_heavy_at_module_level():
    found = list(patch_files(PATCH_PACKAGES))
    assert found and violations(found, heavy_in_patch_file) == []


@pytest.mark.parametrize(
    "source, rule, caught",
    [
        ("import numpy", outside_overlay, True),
        ("def f():\n    from verl.utils import x", outside_overlay, True),
        ("from . import errors", outside_overlay, False),
        ("from megatron.core import parallel_state", beyond_a_feature, True),
        ("def f():\n    from megatron.core import parallel_state", beyond_a_feature, False),
        ("if TYPE_CHECKING:\n    import verl", beyond_a_feature, False),
        ("from post_training.reshard import plan", beyond_a_feature, False),
        ("from post_training.models.megatron import deepseek_v3_model", upstream_too_early, True),
        ("def f():\n    from post_training.models.megatron import deepseek_v3_model", upstream_too_early, False),
        ("import overlay", beyond_a_feature, True),
        ("import overlay", beyond_a_late_change, False),
        ("from overlay import wrap", beyond_a_late_change, True),
        ("from overlay import Feature", beyond_a_feature, False),
        ("from overlay import wrap", beyond_a_feature, True),
        ("class C:\n    import torch", heavy_in_patch_file, True),
        ("def f():\n    import torch", heavy_in_patch_file, False),
        ("from verl_patches import features", heavy_in_patch_file, False),
    ],
)
def test_each_rule_catches_its_fault(tmp_path, source, rule, caught):
    file = tmp_path / "sample.py"
    file.write_text(source)
    assert bool(violations([("overlay.sample", file)], rule)) == caught
