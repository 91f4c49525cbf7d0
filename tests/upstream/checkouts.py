"""Checkouts of upstream projects as one folder to import from, without changing any of their files."""

import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = {"Megatron-LM": "megatron", "MindSpeed": "mindspeed", "MindSpeed-LLM": "mindspeed_llm"}
PRETRAIN = Path("MindSpeed-LLM", "pretrain_gpt.py")
CONVERTER = Path("MindSpeed-LLM", "examples", "mcore", "deepseek3", "convert_ckpt_deepseek3.py")
# MindSpeed-LLM imports both names from apex, which a machine without its Ascend build does not have; MindSpeed then
# replaces FusedAdam by its own AdamW.
_APEX_OPTIMIZERS = """from torch.optim import SGD as FusedSGD
from torch.optim import AdamW as FusedAdam
"""


def missing(folder: Path) -> list[str]:
    """Return the paths that `folder` lacks to be used here."""
    wanted = [Path(checkout, package) for checkout, package in PACKAGES.items()] + [PRETRAIN, CONVERTER]
    return [str(path) for path in wanted if not (folder / path).exists()]


def assemble(folder: Path, target: Path) -> Path:
    """Link the checkouts' packages into `target` file by file; files made at run time then stay out of the checkouts.

    Megatron compiles a helper beside its sources and Python caches bytecode there: both end up in `target`.
    """
    for checkout, package in PACKAGES.items():
        shutil.copytree(folder / checkout / package, target / package, copy_function=_link, ignore=_caches)
    if importlib.util.find_spec("apex") is None:
        (target / "apex").mkdir()
        (target / "apex" / "__init__.py").touch()
        (target / "apex" / "optimizers.py").write_text(_APEX_OPTIMIZERS)
    return target


def assemble_once(folder: Path, kept: Path) -> Path:
    """Assemble into a folder below `kept`, one for each set of files in the checkouts, and return it."""
    roots = [folder / checkout / package for checkout, package in PACKAGES.items()]
    names = sorted(str(path) for root in roots for path in root.rglob("*") if _is_source(path))
    target = kept / hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    if not target.exists():
        partial = target.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        assemble(folder, partial).rename(target)
    return target


def environment(packages: Path) -> dict[str, str]:
    """Return the variables with which a process imports the packages."""
    return {"PYTHONPATH": os.pathsep.join([str(packages), str(_PROJECT)])}


def _link(source: str, destination: str) -> None:
    Path(destination).symlink_to(Path(source).resolve())


def _is_source(path: Path) -> bool:
    return path.is_file() and path.suffix not in (".pyc", ".so")


def _caches(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__" or name.endswith(".so")]
