"""Models for vLLM-Ascend, and the environment of its processes: for evaluate.py and serve.py.

A model is a HuggingFace folder, an export, a checkpoint of a training, which is exported first, or a run's folder,
which stands for its newest checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from overlay.pins import Pins
from post_training.arguments import absolute
from post_training.checkpoint.trained_weights import is_of_verl, is_training_checkpoint, model_folder
from post_training.environment_files import read_environment
from verl_patches.features.training_checkpoint.step_folders import newest_step, saved_steps, step_folder
from verl_plugin.resume.step_folders import newest_complete

ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENTS = ROOT / "scripts" / "env"
_MIB = 1 << 20


@dataclass(frozen=True)
class Stack:
    """Settings of a stack by which its engines differ from another stack's.

    Attributes:
        python: the interpreter that scripts/rehearse.sh or scripts/test.sh sets up.
        dies: the file of variables for a job on real dies.
        emulated: the file of variables for emulated dies.
        strict: variables that a rehearsal adds to that file.
    """

    python: str
    dies: str
    emulated: str
    strict: dict[str, str]


STACKS = {
    "2025": Stack(".venv/bin/python", "one_node.env", "rehearsal.env", {}),
    "2026": Stack(
        ".venv-2026/bin/python",
        "one_node_2026.env",
        "rehearsal_2026.env",
        {"NPU_EMULATOR_STRICT": "1", "NPU_EMULATOR_DEFERRED_COLLECTIVES": "1"},
    ),
}


class InferenceError(Exception):
    """The request cannot be fulfilled with a model or on this machine; the message is one sentence."""


@dataclass(frozen=True)
class Model:
    """A model that a user names.

    Attributes:
        given: the folder that the user named, or the newest checkpoint in it.
        folder: a HuggingFace folder; None for a checkpoint that is not exported yet.
    """

    name: str
    given: Path
    folder: Path | None


def find_model(given: str) -> Model:
    """Return the model of `[NAME=]DIR`.

    Raises:
        InferenceError: no folder, or nothing in it that an engine can load.
    """
    name, named, path = given.partition("=")
    path = path if named else given
    # The engine's processes start in another folder, where a relative path may be another model.
    folder = absolute(path)
    name = name if named else folder.name
    if not name or not name.isprintable() or "/" in name:
        raise InferenceError(f"--model={given} is invalid: {name!r} cannot be shown as a name. Set it to NAME=DIR")
    if not folder.is_dir():
        raise InferenceError(
            f"--model={path} is invalid: not a folder. Set it to a model's folder, an export, or a checkpoint"
        )
    folder = newest_checkpoint(folder)
    trained = is_training_checkpoint(folder)
    if trained and not is_of_verl(folder):
        return Model(name, folder, None)
    for inside in (folder, folder / "actor", folder / "actor" / "huggingface"):
        if (inside / "config.json").is_file() and any(inside.glob("*.safetensors")):
            return Model(name, folder, inside)
    if trained:
        return Model(name, folder, None)
    raise InferenceError(
        f"--model={folder} is invalid: neither config.json with .safetensors nor a checkpoint of a training. Set it to "
        "one of them, or to a run's folder"
    )


def newest_checkpoint(folder: Path) -> Path:
    """Return a run's newest complete checkpoint, in its folder or in `checkpoints/`; any other folder as it is.

    Raises:
        InferenceError: a run whose checkpoints are all incomplete.
    """
    for root in (folder, folder / "checkpoints"):
        if saved_steps(root):
            step, incomplete = newest_step(root)
            if step is None:
                newest, _ = newest_complete(root)  # of the stack 2026
                if newest is not None:
                    return newest
                raise InferenceError(f"--model={folder} is invalid: no checkpoint is complete: {incomplete[0]}")
            return step_folder(root, step)
    return folder


def described(checkpoint: Model) -> Path:
    """Return the folder with the model's config.json and tokenizer, for a checkpoint that is not exported yet.

    Raises:
        ValueError: the checkpoint is not complete, or its model is not here.
    """
    from scripts.export_hf import model_of_run

    model_folder(checkpoint.given)
    return model_of_run(checkpoint.given)


def check_stack(stack: str) -> None:
    """Raise InferenceError if the vLLM that is installed here is another stack's."""
    try:
        installed = importlib.metadata.version("vllm").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return  # a workspace has it as source
    for name in STACKS.keys() - {stack}:
        pinned = Pins.read(stack=name).of_module("vllm")
        if pinned is not None and installed == pinned.release:
            raise InferenceError(
                f"--stack={stack} is invalid: {sys.executable} has vLLM {installed}, of the stack {name}. Set it to "
                f"{name}, or start this with {STACKS[stack].python}"
            )


def check_machine(emulate: bool, dies: int, stack: str) -> None:
    """Raise InferenceError if this machine has no NPUs for the request."""
    emulated = importlib.util.find_spec("npu_emulator") is not None
    if emulate:
        if not emulated:
            raise InferenceError(
                f"{sys.executable} has no emulated NPU. Use {STACKS[stack].python}, which scripts/rehearse.sh sets up"
            )
        return
    if emulated:
        raise InferenceError(f"{sys.executable} has only the emulated NPU. Add --emulate")
    count = "import torch, torch_npu; print(torch.npu.device_count())"
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    asked = subprocess.run([sys.executable, "-c", count], env=environment, capture_output=True, text=True)
    said = asked.stdout.split()
    if asked.returncode or not said:
        raise InferenceError(
            f"{sys.executable} cannot import torch_npu. Start this in the image, after CANN's set_env.sh"
        )
    if int(said[-1]) < dies:
        raise InferenceError(f"torch_npu sees {said[-1]} NPUs, but --tensor-parallel is {dies}. Lower it")


def exported(model: Model, folder: Path) -> Path:
    """Export a checkpoint of a training as a HuggingFace folder."""
    from post_training.checkpoint.conversion import run
    from scripts.export_hf import parse_arguments as export_arguments
    from scripts.export_hf import plan

    print(f"{model.name}: exporting {model.given}", flush=True)
    run(plan(export_arguments([str(model.given), str(folder)])), len(os.sched_getaffinity(0)), lambda line: None)
    return folder


def engine_environment(folder: Path, emulate: bool, dies: int, node: str, stack: str) -> dict[str, str]:
    """Return the environment variables of a process that runs an engine on the model in `folder`.

    Args:
        folder: of the model.
        emulate: whether to use emulated dies that are large enough for the weights.
        dies: number of emulated dies.
        node: name of the emulated node.
        stack: of the packages that are installed here.
    """
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    if not emulate:
        job = read_environment(_ENVIRONMENTS / STACKS[stack].dies)
        job.pop("CANN_ENV")
        return {name: os.environ.get(name, value) for name, value in job.items()} | own
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    variables = read_environment(_ENVIRONMENTS / STACKS[stack].emulated)
    return own | variables | STACKS[stack].strict | {
        "NPU_EMULATOR_DEVICES": str(dies),
        "NPU_EMULATOR_CAPACITY_MB": str(1024 + 3 * weights // _MIB),
        "NPU_EMULATOR_NODE": node,
    }  # fmt: skip
