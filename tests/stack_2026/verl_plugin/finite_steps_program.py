"""Step the optimizer of verl's engine for Megatron-core on two ranks, with some non-finite gradients.

Both ranks have experts, so that Megatron-core has a chain of two optimizers. `main` writes a rank's results to
`finite.<rank>.json`: first for upstream's engine, then for one built after the guard was loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry

import verl_plugin.megatron_core  # noqa: F401

LARGE = 1e30
"""A finite value, also when averaged; the squared norm of several overflows."""


def new_engine(checkpoint: Path) -> Any:
    model = HFModelConfig(path=str(checkpoint), load_tokenizer=False, use_remove_padding=False)
    sizes = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    own = McoreEngineConfig(vanilla_mbridge=True, use_remove_padding=False, **sizes)
    optimizer = McoreOptimizerConfig(lr=1e-2, clip_grad=1.0, total_training_steps=100, lr_warmup_steps=0)
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=model,
        engine_config=own,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def flat_gradients(engine: Any) -> list[torch.Tensor]:
    return [flat.grad_data for chunk in engine.module for flat in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def updated(engine: Any, spoil: Callable[[list[torch.Tensor]], None]) -> dict[str, Any]:
    """Run an update whose backward pass leaves gradients of 0.1, changed by `spoil` on rank 1."""
    before = bits(engine)

    def gradients(*_: Any, **__: Any) -> dict[str, Any]:
        for flat in flat_gradients(engine):
            flat.fill_(0.1)
        if dist.get_rank() == 1:
            spoil(flat_gradients(engine))
        return {"metrics": {}}

    engine.forward_backward_batch = gradients
    found: dict[str, Any] = {"error": ""}
    try:
        metrics = engine.train_batch(TensorDict({}, batch_size=[]), None)["metrics"]
        counted = metrics.get("nonfinite_steps")
        found |= {"norm": float(metrics["grad_norm"]), "counted": counted and counted.aggregate()}
        found["norm is finite"] = math.isfinite(found.pop("norm"))
    except RuntimeError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    finite = all(bool(parameter.isfinite().all()) for chunk in engine.module for parameter in chunk.parameters())
    return found | {"changed": bits(engine) != before, "finite": finite}


def bits(engine: Any) -> str:
    """Return a SHA-256 digest of weights, main weights and moments."""
    total = hashlib.sha256()
    tensors = [parameter for chunk in engine.module for parameter in chunk.parameters()]
    for part in engine.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            tensors += group["params"]
        for state in part.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        total.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def one(value: float, where: int) -> Callable[[list[torch.Tensor]], None]:
    """Return a function that sets one element of the dense (`where` 0) or the experts' (-1) gradients to `value`.

    The dense element is in the half that rank 1 updates.
    """

    def spoil(flats: list[torch.Tensor]) -> None:
        flats[where][3 * len(flats[where]) // 4] = value

    return spoil


def large(flats: list[torch.Tensor]) -> None:
    for flat in flats:
        flat.fill_(LARGE)


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    stock = new_engine(folder / "qwen3moe")
    found: dict[str, Any] = {"parts": len(stock.optimizer.chained_optimizers)}
    found["stock"] = [updated(stock, lambda _: None), updated(stock, one(math.nan, 0))]
    import verl_plugin.finite_steps as guard

    guard.MOST_IN_A_ROW = 4
    engine = new_engine(folder / "qwen3moe")
    found["first"] = updated(engine, lambda _: None)
    found["nan"] = updated(engine, one(math.nan, 0))
    found["expert"] = updated(engine, one(math.inf, -1))
    found["large"] = updated(engine, large)
    found["next"] = updated(engine, lambda _: None)
    found["row"] = [updated(engine, one(math.nan, 0)) for _ in range(4)]
    if rank == 1:
        with torch.no_grad():
            next(engine.module[0].parameters()).fill_(math.nan)
    engine._skipped_in_a_row = 0
    found["weights"] = updated(engine, one(math.nan, 0))
    (folder / f"finite.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
