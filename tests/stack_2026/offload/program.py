"""Run steps of verl's own engines for an actor and a reference; record device memory by phase, and bytes copied.

`main(folder)` writes the results to `<rank>.json`, by engine and by who offloads its state: verl, this project, or this
project with one of `FAULTS`. Passes come in the order of verl's trainer. Weights are handed over as verl's worker does
it (`update_weights` of `verl.workers.engine_workers`), to a rollout that only reads them.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from megatron.core import parallel_state
from torch.distributed.tensor import DTensor

from npu_emulator import meters
from tests.stack_2026.routing_replay.program import Case, engine_of, loss_of
from tests.stack_2026.verl_plugin.phase_peaks_program import ENGINES, batch, digest

STEPS, CYCLES = 3, 50
VERL, OURS = "verl", "ours"
FAULTS = ("nothing leaves", "others stay", "optimizer stays", "written is dropped")
GROUPS = ("actor", "gradients", "optimizer", "reference")


def offload(engine: Any, trains: bool) -> None:
    """Offload an engine as verl's keys `param_offload` and `optimizer_offload` do."""
    if not trains and engine.engine_config.strategy == "fsdp2":
        return  # verl keeps it on the host anyway
    engine._is_offload_param, engine._is_offload_optimizer = True, trains
    engine.to("cpu", model=True, optimizer=trains, grad=True)


def on_die(tensors: Iterable[Any]) -> int:
    """Return the bytes that the storages of these tensors take on the die, counting shared ones once."""
    held = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, torch.Tensor) and local.device.type == "npu":
            storage = local.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def modules(engine: Any) -> list[Any]:
    return engine.module if isinstance(engine.module, list) else [engine.module]


def gradients(engine: Any) -> Iterator[Any]:
    for module in modules(engine):
        if isinstance(getattr(module, "buffers", None), list):  # an attribute in Megatron, a method in torch
            yield from (buffer.grad_data for buffer in (*module.buffers, *module.expert_parallel_buffers))
        yield from (parameter.grad for parameter in module.parameters())


def optimizer_state(engine: Any) -> Iterator[Any]:
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        for state in getattr(optimizer, "optimizer", optimizer).state.values():
            yield from (each for each in state.values() if isinstance(each, torch.Tensor) and each.numel() > 1)


class Steps:
    """The steps of one actor and its reference.

    Args:
        actor: verl's engine.
        reference: a second engine, which does not train.
        packed: whether samples lie end to end instead of padded.
    """

    def __init__(self, actor: Any, reference: Any, packed: bool) -> None:
        self.actor, self.reference, self._packed = actor, reference, packed
        self.held: dict[str, dict[str, int]] = {}
        self.copied: dict[str, int] = {}
        self.losses: list[float] = []

    def record(self, phase: str) -> None:
        """Record how many bytes of each group are on the die now."""
        parameters = {name: (each for module in modules(engine) for each in module.parameters())
                      for name, engine in (("actor", self.actor), ("reference", self.reference))}  # fmt: skip
        parameters |= {"gradients": gradients(self.actor), "optimizer": optimizer_state(self.actor)}
        self.held[phase] = {name: on_die(parameters[name]) for name in GROUPS}

    def make(self) -> None:
        """Run one step, and keep its gradient norm and the bytes that it copied."""
        before = copies()
        self.forward(self.actor, "old_log_prob")
        self.forward(self.reference, "ref")
        with self.actor.train_mode():
            with self.actor.train_mode(disable_auto_offload=True):  # one for each mini batch, as in verl's worker
                output = self.actor.train_batch(batch(self._packed), loss_of)
                self.record("update")
        self.record("behind the update")
        if self.actor.is_mp_src_rank_with_outputs():
            self.losses.append(float(output["metrics"]["grad_norm"]))
        self.offer()
        self.copied = {name: after - before[name] for name, after in copies().items()}

    def forward(self, engine: Any, phase: str) -> None:
        with engine.eval_mode():
            engine.infer_batch(batch(self._packed))
            self.record(phase)

    def offer(self) -> None:
        """Hand the weights over as verl's worker does, between waking the rollout's weights and its KV cache."""
        torch.npu.empty_cache()
        weights, _ = self.actor.get_per_tensor_param(layered_summon=False, base_sync_done=True)
        for number, _ in enumerate(weights):
            if number == 0:
                self.record("reshard")
        if self.actor.is_param_offload_enabled:
            self.actor.to("cpu", model=True, optimizer=False, grad=False)
        torch.npu.synchronize()
        torch.npu.empty_cache()
        self.record("rollout")

    def cycle(self) -> None:
        """Run a step in which nothing is computed."""
        for engine in (self.actor, self.reference):
            with engine.eval_mode():
                pass
        with self.actor.train_mode(), self.actor.train_mode(disable_auto_offload=True):
            pass
        self.offer()


def copies() -> dict[str, int]:
    """Return the bytes copied so far between host and die, in each direction."""
    return {way: each["bytes"] for way, each in meters.snapshot()["copies"].items() if "host" in way}


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plant a fault in the offload manager within the block."""
    from verl_plugin.offload.manager import OffloadManager

    upstream: dict[str, Callable[..., Any]] = {
        name: getattr(OffloadManager, name) for name in ("_begin", "to", "train_mode")
    }

    def stays(self: Any, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        upstream["to"](self, device, model, optimizer and device != "cpu", grad)

    def unmarked(self: Any, **named: Any) -> Any:
        marks = self._written, self._host
        context = upstream["train_mode"](self, **named)
        self._written, self._host = marks
        return context

    if fault == "others stay":
        OffloadManager._begin = lambda _: None  # type: ignore[method-assign]
    elif fault == "optimizer stays":
        OffloadManager.to = stays  # type: ignore[method-assign]
    elif fault == "written is dropped":
        OffloadManager.train_mode = unmarked  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, method in upstream.items():
            setattr(OffloadManager, name, method)


def found_of(folder: Path, case: Case, who: str) -> dict[str, Any]:
    actor = engine_of(folder / case.model, case)
    reference = engine_of(folder / case.model, case, trains=False)
    if who != "nothing leaves":
        for engine, trains in ((actor, True), (reference, False)):
            offload(engine, trains)
    steps = Steps(actor, reference, case.packed)
    for _ in range(STEPS):
        steps.make()
    found: dict[str, Any] = {"held": steps.held, "copied": steps.copied, "norms": steps.losses}
    found["weights"] = digests(actor, reference)
    found["bytes"] = {name: parameter_bytes(engine) for name, engine in (("actor", actor), ("reference", reference))}
    if who == OURS:
        found["cycles"] = cycles(steps, CYCLES)
        found["same"] = digests(actor, reference) == found["weights"]
        found["leaks"] = cycles(steps, 3, leaks=True)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return found


def digests(*engines: Any) -> list[str]:
    """Return a digest of each engine's weights, which are loaded to the die for it."""
    found = []
    for engine in engines:
        if engine.is_param_offload_enabled:
            engine.to("npu", model=True, optimizer=False, grad=False)
        found.append(digest(engine))
        if engine.is_param_offload_enabled:
            engine.to("cpu", model=True, optimizer=False, grad=False)
    return found


def parameter_bytes(engine: Any) -> int:
    locals_ = [each.to_local() if isinstance(each, DTensor) else each
               for module in modules(engine) for each in module.parameters()]  # fmt: skip
    return sum(each.numel() * each.itemsize for each in locals_)


def cycles(steps: Steps, count: int, leaks: bool = False) -> list[list[int]]:
    """Offload and load the state `count` times. Return the bytes allocated by torch and those free after each cycle."""
    gc.collect()  # collect earlier engines
    found, kept = [], []
    for _ in range(count):
        steps.cycle()
        found.append([torch.npu.memory_allocated(), torch.npu.mem_get_info()[0]])
        kept.append(torch.empty(1 << 20, device="npu") if leaks else None)
    return found


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    found: dict[str, dict[str, Any]] = {name: {} for name in ENGINES}
    make = partial(found_of, folder)
    for name, case in ENGINES.items():
        found[name] = {who: make(case, who) for who in (VERL, "nothing leaves")}
    import verl_plugin.offload.engines  # noqa: F401  (it extends the engines that are made from here on)

    for name, case in ENGINES.items():
        found[name][OURS] = make(case, OURS)
        for fault in FAULTS[1:]:
            with planted(fault):
                found[name][fault] = make(case, fault)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
