"""Measure phase peaks of verl's own engines: each phase of a step as it is, and with an extra tensor on rank 1.

`main(folder)` writes to `<rank>.json` the metrics of each step and the peak bytes of each phase as the emulated die
counts them, then the memory after each of many offloads and loads of the training state.
Another process takes memory of each die throughout.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from megatron.core import parallel_state
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu

from npu_emulator import meters
from tests.stack_2026.routing_replay.program import Case, engine_of, loss_of

ENGINES = {
    "fsdp2": Case("fsdp2", "qwen3", "disabled", packed=True, extended=False),
    "megatron": Case("megatron", "qwen3moe", "disabled", extended=False, distributed=True),
}
PHASES = ("reshard", "old_log_prob", "ref", "update")
PLANTED_BYTES, NEIGHBOUR_BYTES = 128 << 20, 48 << 20
CYCLES = 50


@contextmanager
def neighbour(device: int) -> Iterator[None]:
    """Let another process take `NEIGHBOUR_BYTES` of a die. Enter before this process touches a die."""
    ready, done = os.pipe(), os.pipe()
    if os.fork() == 0:
        torch.npu.set_device(device)
        held = torch.empty(NEIGHBOUR_BYTES, dtype=torch.uint8, device="npu")
        os.write(ready[1], b"1" if held.numel() else b"")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        yield
    finally:
        os.write(done[1], b"1")


def batch(packed: bool) -> Any:
    """Build a batch of two samples as verl's workers get it."""
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    samples = [torch.arange(3, 3 + length) for length in (9, 6)]
    tensors = {
        "input_ids": nested(samples),
        "position_ids": nested([torch.arange(len(each)) for each in samples]),
        "response_mask": nested([torch.ones(len(each) // 2, dtype=torch.int64) for each in samples]),
        "loss_mask": nested([torch.ones(len(each) // 2, dtype=torch.int64) for each in samples]),
    }
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "use_remove_padding": packed,
        "use_fused_kernels": False,
        "temperature": 1.0,
        "update_lr_scheduler": True,
    }
    return tu.get_tensordict(tensors, settings)


def plant(is_here: bool) -> None:
    """Allocate memory and free it again."""
    if is_here:
        torch.empty(PLANTED_BYTES, dtype=torch.uint8, device="npu")


def step(actor: Any, reference: Any, packed: bool, planted: str) -> dict[str, Any]:
    """Run a step in which phase `planted` allocates an extra tensor on rank 1."""
    found: dict[str, Any] = {"emulator": {}}

    def reshard() -> None:
        weights, _ = actor.get_per_tensor_param()
        for _ in weights:
            pass

    def forward(engine: Any) -> None:
        with engine.eval_mode():
            engine.infer_batch(batch(packed))

    def update() -> None:
        with actor.train_mode():
            plant(planted == "update" and dist.get_rank() == 1)
            output = actor.train_batch(batch(packed), loss_of)
        if actor.is_mp_src_rank_with_outputs():
            kept = {name: each for name, each in output["metrics"].items() if name.startswith("memory/")}
            found["metrics"] = {name: float(each.aggregate()) for name, each in kept.items()}

    passes: dict[str, Callable[[], None]] = {
        "reshard": reshard,
        "old_log_prob": partial(forward, actor),
        "ref": partial(forward, reference),
        "update": update,
    }
    for phase in PHASES:
        torch.npu.empty_cache()  # the emulated die also counts memory that torch caches
        with meters.phase(f"{id(actor)} {planted} {phase}"):
            passes[phase]()
            plant(planted == phase != "update" and dist.get_rank() == 1)
        [own] = meters.snapshot()["phases"][f"{id(actor)} {planted} {phase}"]["peak_bytes"].values()
        found["emulator"][phase] = own
    return found


def cycles(engine: Any, count: int, leaks: bool = False) -> list[list[int]]:
    """Offload and load weights, gradients and optimizer `count` times.

    Returns:
        For each cycle, the bytes allocated by torch and those free on the die, first offloaded and then loaded.
    """
    found, kept = [], []
    for _ in range(count):
        row = []
        for place in ("cpu", "npu"):
            engine.to(place, model=True, optimizer=True, grad=True)
            torch.npu.empty_cache()
            row += [torch.npu.memory_allocated(), torch.npu.mem_get_info()[0]]
        found.append(row)
        kept.append(torch.empty(1 << 20, device="npu") if leaks else None)
    return found


def digest(engine: Any) -> str:
    """Return a SHA-256 digest of this rank's weights."""
    modules = engine.module if isinstance(engine.module, list) else [engine.module]
    total = hashlib.sha256()
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total.update(local.detach().float().cpu().numpy().tobytes())
    return total.hexdigest()


def found_of(folder: Path, case: Case) -> dict[str, Any]:
    """Run the steps of one engine; the first one creates lasting state, such as the optimizer's."""
    actor = engine_of(folder / case.model, case)
    reference = engine_of(folder / case.model, case, trains=False)
    steps: dict[str, Any] = {
        planted: step(actor, reference, case.packed, planted) for planted in ("first", "none", *PHASES)
    }
    before, _ = digest(actor), cycles(actor, 1)
    steps |= {"cycles": cycles(actor, CYCLES), "same": digest(actor) == before, "leaks": cycles(actor, 3, leaks=True)}
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return steps


def main(folder: Path) -> None:
    import verl_plugin.megatron_float32
    import verl_plugin.phase_peaks  # noqa: F401  (after it: a test that imports this file imports no Megatron)

    rank = int(os.environ["RANK"])
    with neighbour(rank):
        torch.npu.set_device(rank)
        dist.init_process_group("cpu:gloo,npu:hccl")
        found = {name: found_of(folder, case) for name, case in ENGINES.items()}
        (folder / f"{rank}.json").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
