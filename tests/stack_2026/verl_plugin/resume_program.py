"""Ranks whose engines update weights, save, and load checkpoints of other layouts or of the stack 2025.

`main(folder)` carries out the tasks in the folder's `tasks.json`, one engine after the other, and writes a rank's
results to `<name of the task>.<rank>.json`. Gradients are a function of each weight's value and the number of the
update, so that they do not depend on the layout. If any task has options of Megatron-core's `optimizer`, its engines
train in bfloat16, otherwise in float32.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
)
from verl.workers.engine import EngineRegistry

if "mindspeed" not in sys.modules:  # MindSpeed has layers of its own; a calling program may have imported it
    importlib.import_module("verl_plugin.megatron_core")

# isort: split
import verl_plugin.resume.engines  # noqa: F401
from post_training.checkpoint.manifest import Manifest
from post_training.checkpoint.training_files import STEPS, file_name, write_file
from post_training.checkpoint.training_rank import common_steps
from tests.stack_2026.verl_plugin.resume_reference import IDS, OPTIMIZER, gradient, loss_of
from verl_patches.features.training_checkpoint.saving import entries_of
from verl_plugin.resume.ranks import fsdp2_rank, megatron_rank


def new_engine(task: dict[str, Any]) -> Any:
    """Build verl's engine for a task, without gradient clipping."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # Megatron-core keeps the previous model's attention backend in these
    eager = {"attn_implementation": "eager"}
    model = HFModelConfig(path=task["model"], load_tokenizer=False, use_remove_padding=False, override_config=eager)
    if task["backend"] == "megatron":
        sizes = {f"{name}_parallel_size": size for name, size in task["sizes"].items()}
        leaves = dict.fromkeys(("param_offload", "optimizer_offload"), task.get("leaves", False))
        own = McoreEngineConfig(
            vanilla_mbridge=True, use_remove_padding=False, dist_ckpt_optim_fully_reshardable=True, **leaves, **sizes
        )
        optimizer = McoreOptimizerConfig(
            **OPTIMIZER, use_checkpoint_opt_param_scheduler=True, override_optimizer_config=task.get("optimizer", {})
        )
    else:
        types = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "float32")
        own = FSDPEngineConfig(strategy="fsdp2", dtype="float32", mixed_precision=types, use_torch_compile=False)
        optimizer = FSDPOptimizerConfig(**OPTIMIZER)
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=task["backend"],
        model_config=model,
        engine_config=own,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(load_contents=task.get("contents", ["model", "optimizer", "extra"])),
    )
    engine.initialize()
    return engine


def leaves(engine: Any) -> bool:
    """Return whether parameters are on the die only during a pass, as in verl's training."""
    return getattr(engine, "_is_offload_param", False)


def update(engine: Any, number: int) -> float:
    """Run an update, and return the learning rate of the next one."""

    def gradients(*_: Any, **__: Any) -> dict[str, Any]:
        modules = engine.module if isinstance(engine.module, list) else [engine.module]
        for parameter in (each for module in modules for each in module.parameters()):
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.copy_(gradient(parameter.detach(), number))
            else:
                parameter.grad = gradient(parameter.detach(), number)
        return {"metrics": {}}

    engine.forward_backward_batch = gradients
    with engine.train_mode() if leaves(engine) else nullcontext():
        engine.train_batch(TensorDict({}, batch_size=[]), None)
    rate = engine.lr_scheduler_step()
    return float(rate[0] if isinstance(rate, list) else rate)


def loss(engine: Any) -> float:
    """Return the loss of a fixed sequence."""
    with torch.no_grad():
        if isinstance(engine.module, list):
            from tests.stack_2026.verl.megatron_program import logits_of  # on Megatron-core's own layers

            logits = logits_of(engine.module[0], IDS)
        else:
            logits = engine.module(input_ids=IDS.npu(), use_cache=False).logits
            engine.module.reshard()
    return loss_of(logits.float().cpu())


def write_states(engine: Any, folder: Path) -> None:
    """Write all ranks' weights and optimizer averages, by HF name."""
    rank = megatron_rank(engine) if isinstance(engine.module, list) else fsdp2_rank(engine)
    name = file_name(dist.get_rank(), dist.get_world_size())
    written: list[Any] = [None] * dist.get_world_size()
    with engine.eval_mode() if leaves(engine) else nullcontext():
        mine = write_file(folder / name, entries_of(rank), {STEPS: str(common_steps(rank.optimizer_shards))})
    dist.all_gather_object(written, (name, mine))
    if dist.get_rank() == 0:
        Manifest({}, files=dict(written), complete=True).write(folder)
    dist.barrier()


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Make an optimizer on the host skip one value when it loads: the number of updates, or a tensor by name."""
    from verl_plugin.resume.hybrid_optimizer import ResumableHybridOptimizer as Hybrid

    right = Hybrid.load_parameter

    def lacking(self: Any, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        own = {"param": self.param_to_inner_param[parameter], **self.state[parameter]}
        right(self, parameter, {**tensors, fault: own[fault].clone()})

    with pytest.MonkeyPatch.context() as patch:
        if fault == STEPS:
            patch.setattr(Hybrid, "set_steps", lambda *_: None)
        elif fault:
            patch.setattr(Hybrid, "load_parameter", lacking)
        yield


def carry_out(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Load, update, save and update again, as far as the task asks for it."""
    engine, found, rates = new_engine(task), {}, []
    if task.get("load"):
        try:
            with planted(task["fault"]) if "fault" in task else nullcontext():
                engine.load_checkpoint(task["load"], del_local_after_load=False)
        except Exception as error:  # the test checks any error
            return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        write_states(engine, folder / f"{task['name']}.loaded")
        if "mindspeed" not in sys.modules:
            with engine.eval_mode() if leaves(engine) else nullcontext():
                found["loss"] = loss(engine)
    for number in range(task.get("first", 1), task["last"] + 1):
        rates.append(update(engine, number))
        if number == task.get("save_at"):
            # Give each FSDP2 rank a different random state; Megatron-core saves one rank's for all.
            torch.rand(3 + (dist.get_rank() if task["backend"] == "fsdp2" else 0))
            torch.rand(5, device="npu")
            engine.save_checkpoint(task["save"], global_step=number)
            write_states(engine, folder / f"{task['name']}.saved")
    write_states(engine, folder / f"{task['name']}.last")
    found |= {"rates": rates, "random": [float(torch.rand(1)), float(torch.rand(1, device="npu"))]}
    return found


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    tasks = json.loads((folder / "tasks.json").read_text())
    if not any("optimizer" in task for task in tasks):
        importlib.import_module("verl_plugin.megatron_float32")
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    for task in tasks:
        found = carry_out(folder, task)
        (folder / f"{task['name']}.{rank}.json").write_text(json.dumps(found))
    for child in multiprocessing.active_children():  # Megatron-core's children would outlive a forked rank
        child.terminate()
    dist.barrier()
    dist.destroy_process_group()
