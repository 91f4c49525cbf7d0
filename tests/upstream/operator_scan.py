"""Find the NPU operators in the sources of the pinned code bases.

    python -m tests.upstream.operator_scan --upstream FOLDER [--write]

compares (or writes) ``reached_operators.json`` with checkouts in FOLDER and
this repository. A place counts if its module can be imported, through any chain
of import statements or of module names in strings, from a code base's entry
modules, unless `OUTSIDE` says why neither dense nor DeepSeek models with bf16
weights reach it. In this repository, every module that runs beside the code
bases counts.
"""

import argparse
import ast
import functools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch_npu  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = "overlay"
"""The name of this repository in the list."""
_OWN = (
    "verl_patches", "megatron_patches", "mindspeed_patches", "vllm_patches", "vllm_ascend_patches", "post_training"
)  # fmt: skip
REACHED_OPERATORS = Path(__file__).with_name("reached_operators.json")
_EXPORTED = re.compile(r"""\bm\.def\(\s*"(\w+)\"""")


@dataclass(frozen=True)
class CodeBase:
    """A checkout, its package, and the modules from which users start."""

    checkout: str
    package: str
    begins: tuple[str, ...]


CODE_BASES = (
    CodeBase("verl", "verl", ("verl.trainer.main_ppo", "verl.workers.megatron_workers", "verl.workers.fsdp_workers")),
    CodeBase("vllm-ascend", "vllm_ascend", ("vllm_ascend",)),
    CodeBase("vllm-ascend-0.9.1", "vllm_ascend", ("vllm_ascend",)),
    CodeBase("MindSpeed", "mindspeed", ("mindspeed.megatron_adaptor",)),
    CodeBase(
        "MindSpeed-LLM", "mindspeed_llm", ("mindspeed_llm.tasks.megatron_adaptor", "mindspeed_llm.tasks.posttrain")
    ),
)

_QUANTISED = "weights quantised to W8A8 or W4A8"
_VISION = "models that see"
_LEGACY = "Megatron's legacy models"
_ENGINE = "vLLM's V0 engine"
# Prefixes of "file:function operator" that neither dense nor DeepSeek models with bf16 weights reach, and why.
OUTSIDE = {
    "vllm_ascend/quantization/": _QUANTISED,
    "vllm_ascend/ops/layernorm.py:AddRMSNormW8A8Quant.": _QUANTISED,
    "vllm_ascend/models/deepseek_v2.py:CustomDeepseekV2SiluAndMul.": _QUANTISED,
    "vllm_ascend/models/deepseek_dbo.py:CustomDeepseekDBOMLP._forward_ms_mlp npu::npu_quant_matmul": _QUANTISED,
    "vllm_ascend/ops/fused_moe.py:AscendFusedMoE.forward npu::npu_dynamic_quant": _QUANTISED,
    "vllm_ascend/models/qwen2_vl.py": _VISION,
    "vllm_ascend/models/qwen2_5_vl": _VISION,
    "vllm_ascend/attention/attention.py": _ENGINE,
    "mindspeed/mindspore/": "MindSpore in the place of torch",
    "mindspeed/ops/lcal_functional.py:CoCOperations.pure_matmul": "nothing: no caller",
    "mindspeed_llm/legacy/": _LEGACY,
    "mindspeed/model/transformer.py": _LEGACY,
}


@functools.cache
def registered() -> set[str]:
    """Return the operators that torch_npu registers, by full name and without overloads."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.partition(".")[0] for name in names if name.startswith(("npu::", "atb::"))}


def exported_functions(sources: Iterable[Path]) -> set[str]:
    """Return the names that C++ sources bind with pybind11."""
    return {name for source in sources for name in _EXPORTED.findall(source.read_text(errors="replace"))}


def reached_operators() -> dict[str, dict[str, list[str]]]:
    """Return the places that reach each operator: in this repository, verl, vllm-ascend, MindSpeed, MindSpeed-LLM."""
    return json.loads(REACHED_OPERATORS.read_text())


def outside(place: str) -> str | None:
    """Return why neither dense nor DeepSeek models reach a place, or None if they do."""
    return next((why for beginning, why in OUTSIDE.items() if place.startswith(beginning)), None)


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def _file_of(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _named_modules(module: str, file: Path) -> Iterator[str]:
    """Yield everything in a file that may be a module's name: imports, and strings with dots."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.:]+", node.value):
            name = node.value.partition(":")[0]
            yield from (name, name.rpartition(".")[0])


def reachable(base: CodeBase, checkouts: Path) -> dict[str, Path]:
    """Return the modules of the package that its entry modules may import, with their files."""
    root, found, waiting = checkouts / base.checkout, {}, list(base.begins)
    while waiting:
        module = waiting.pop()
        if module in found or module.split(".")[0] != base.package:
            continue
        file = _file_of(root, module)
        if file is not None:
            found[module] = file
            waiting += [*_named_modules(module, file), module.rpartition(".")[0]]
    return found


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def operator_of(node: ast.Attribute) -> str | None:
    """Return the full name of the operator in an expression like ``torch_npu.npu_swiglu``."""
    holder, _, name = _dotted(node).rpartition(".")
    if holder == "torch.ops._C":
        return f"_C::{name}"
    if holder in ("torch_npu.atb", "torch.ops.atb"):
        return f"atb::{name}"
    if holder not in ("torch_npu", "torch.ops.npu", "torch.ops.npu_inference"):
        return None
    full = f"atb::{name}" if name.startswith("_npu_") else f"npu::{name}"
    return full if re.match(r"_?npu_", name) or full in registered() else None


def _extension_call(node: ast.AST, exported: set[str]) -> str | None:
    """Return the full name of a called extension function, as in ``builder.load().npu_gmm(...)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in exported:
        return None
    is_wrapper = _dotted(node.func.value).split(".")[0] in ("torch", "torch_npu")
    return None if is_wrapper else f"npu_extension::{node.func.attr}"


def _uses(node: ast.AST, exported: set[str], inside: str = "") -> Iterator[tuple[str, str]]:
    """Yield operators that are read, not assigned, with their class and function."""
    for child in ast.iter_child_nodes(node):
        scope = f"{inside}.{child.name}" if hasattr(child, "name") and hasattr(child, "body") else inside
        operator = _extension_call(child, exported)
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
            operator = operator_of(child)
        if operator:
            yield operator, scope.lstrip(".")
        yield from _uses(child, exported, scope)


def _extension_functions(root: Path, package: str) -> set[str]:
    """Return the functions that the compiled CANN and ATB kernels export, without allocators and host algorithms."""
    folder = root / package / "ops" / "csrc"
    return exported_functions(file for part in ("cann", "atb") for file in sorted((folder / part).glob("*.cpp")))


def _places(checkouts: Path, code_bases: Iterable[CodeBase]) -> Iterator[tuple[str, str, str, str]]:
    """Yield operator, code base, file and scope of every use in importable modules."""
    for base in code_bases:
        root = checkouts / base.checkout
        exported = _extension_functions(root, base.package)
        for file in reachable(base, checkouts).values():
            for operator, scope in _uses(_parsed(file), exported):
                yield operator, base.checkout, str(file.relative_to(root)), scope


def _own_places() -> Iterator[tuple[str, str, str, str]]:
    for file in sorted(file for folder in _OWN for file in (ROOT / folder).rglob("*.py")):
        for operator, scope in _uses(_parsed(file), set()):
            yield operator, OVERLAY, str(file.relative_to(ROOT)), scope


def scan(
    checkouts: Path, code_bases: Iterable[CodeBase] = CODE_BASES, own: bool = False
) -> dict[str, dict[str, list[str]]]:
    """Return the places that reach each operator and, for operators without any, why their uses do not count.

    `own`: include this repository.
    """
    reached: dict[str, set[str]] = {}
    elsewhere: dict[str, set[str]] = {}
    for operator, base, path, scope in (*_places(checkouts, code_bases), *(_own_places() if own else ())):
        why = outside(f"{path}:{scope} {operator}")
        into, said = (elsewhere, why) if why else (reached, f"{base} {path}")
        into.setdefault(operator, set()).add(said)
    return {
        "reached": {name: sorted(reached[name]) for name in sorted(reached)},
        "elsewhere": {name: sorted(elsewhere[name]) for name in sorted(elsewhere.keys() - reached.keys())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, required=True, metavar="FOLDER", help="folder with the checkouts")
    parser.add_argument("--write", action="store_true", help="write the file instead of comparing")
    options = parser.parse_args()
    found = json.dumps(scan(options.upstream, own=True), indent=1) + "\n"
    if options.write:
        REACHED_OPERATORS.write_text(found)
    elif found != REACHED_OPERATORS.read_text():
        raise SystemExit(f"{REACHED_OPERATORS} is not what the checkouts say; --write renews it")


if __name__ == "__main__":
    main()
