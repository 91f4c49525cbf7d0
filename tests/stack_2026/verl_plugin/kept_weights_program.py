"""Train with verl's engines as its trainer `separate_async` does between two weight updates.

For each optimizer step after the first, verl's worker keeps the newest weights on the host, puts the rollout's back for
old log-probs, and then the newest ones. `main(folder)` writes to `<rank>.json`, by engine and by `WAYS`, digests of the
weights behind the steps and of each step's old log-probs.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from megatron.core import parallel_state
from verl.experimental.separation.engine_workers import DetachActorWorker

from tests.stack_2026.routing_replay.program import Case, engine_of, loss_of
from tests.stack_2026.verl_plugin.phase_peaks_program import ENGINES, batch, digest

STEPS = 3
# Without copies; as verl does; as verl does with weights that leave the die; and without the rollout's weights.
PLAIN, KEPT, OFFLOADED, NEWEST = "plain", "kept", "offloaded", "newest"
WAYS = (PLAIN, KEPT, OFFLOADED, NEWEST)


def worker_of(engine: Any, strategy: str) -> DetachActorWorker:
    """Return verl's worker with this engine, without what only Ray needs."""
    worker = object.__new__(DetachActorWorker)
    worker._strategy_handlers = None
    worker.config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))
    worker.actor = SimpleNamespace(engine=engine)
    return worker


def old_log_probs(engine: Any, packed: bool) -> str:
    """Return a digest of a forward's log-probs."""
    with engine.eval_mode():
        output = engine.infer_batch(batch(packed))
    total = hashlib.sha256()
    for each in output["model_output"]["log_probs"].unbind():
        total.update(each[:-1].float().cpu().numpy().tobytes())
    return total.hexdigest()


def trained(folder: Path, case: Case, way: str) -> dict[str, Any]:
    """Make the optimizer steps of one way, as `PPOTrainerSeparateAsync._compute_old_log_prob` orders the calls."""
    engine, old = engine_of(folder / case.model, case), []
    worker = worker_of(engine, case.backend)
    if way == OFFLOADED:
        engine._is_offload_param = True
        engine.to("cpu", model=True, optimizer=False, grad=True)
    for step in range(STEPS):
        if way != PLAIN:
            worker.save_model_to_cpu(step)
            if step and way != NEWEST:
                worker.restore_model_from_cpu(0)
            old.append(old_log_probs(engine, case.packed))
            if step:
                worker.restore_model_from_cpu(step)
                worker.clear_cpu_model(step)
        with engine.train_mode():
            engine.train_batch(batch(case.packed), loss_of)
    if way == OFFLOADED:
        engine.to("npu", model=True, optimizer=False, grad=False)
    found = {"weights": digest(engine), "old": old}
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return found


def main(folder: Path) -> None:
    import verl_plugin.megatron_float32  # noqa: F401  (a test that imports this file imports no Megatron)

    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    found = {name: {way: trained(folder, case, way) for way in WAYS} for name, case in ENGINES.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
