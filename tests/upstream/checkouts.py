"""Checkouts of upstream projects as one folder to import from, without a change to any of their files."""

import importlib.util
import shutil
from pathlib import Path

PACKAGES = {"Megatron-LM": "megatron", "MindSpeed": "mindspeed", "MindSpeed-LLM": "mindspeed_llm"}
PRETRAIN = Path("MindSpeed-LLM", "pretrain_gpt.py")
CONVERTER = Path("MindSpeed-LLM", "examples", "mcore", "deepseek3", "convert_ckpt_deepseek3.py")
# MindSpeed-LLM imports both names from apex, which a machine without its Ascend build does not have; MindSpeed then
# puts its own AdamW in the place of FusedAdam.
_APEX_OPTIMIZERS = """from torch.optim import SGD as FusedSGD
from torch.optim import AdamW as FusedAdam
"""


def missing(folder: Path) -> list[str]:
    """What `folder` lacks to be used here."""
    wanted = [Path(checkout, package) for checkout, package in PACKAGES.items()] + [PRETRAIN, CONVERTER]
    return [str(path) for path in wanted if not (folder / path).exists()]


def assemble(folder: Path, target: Path) -> Path:
    """A folder with the packages of the checkouts, each file a link, so that what is built at run time stays out.

    Megatron compiles a helper beside its sources and Python caches bytecode there: both end up in `target`.
    """
    for checkout, package in PACKAGES.items():
        shutil.copytree(folder / checkout / package, target / package, copy_function=_link, ignore=_caches)
    if importlib.util.find_spec("apex") is None:
        (target / "apex").mkdir()
        (target / "apex" / "__init__.py").touch()
        (target / "apex" / "optimizers.py").write_text(_APEX_OPTIMIZERS)
    return target


def _link(source: str, destination: str) -> None:
    Path(destination).symlink_to(Path(source).resolve())


def _caches(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__" or name.endswith(".so")]
