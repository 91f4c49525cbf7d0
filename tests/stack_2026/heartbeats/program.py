"""verl's own engines with heartbeats on two emulated dies, judged under a simulated clock.

`main(folder)` writes to `<rank>.json` which processes were reported in each phase of each engine, in three cases: each
micro batch is slow but within the limit; each exceeds the limit; each is slow and progress is not counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from megatron.core import parallel_state
from verl.utils import tensordict_utils as tu

from post_training.hang_detection.limits import Watch
from post_training.hang_detection.settings import WatchSettings
from post_training.hang_detection.signs import TRAINER, Signs, process_signs
from tests.stack_2026.routing_replay.program import Case, engine_of, loss_of
from tests.stack_2026.verl_plugin.phase_peaks_program import batch
from verl_plugin.engines import extend_engine

ENGINES = {
    "fsdp2": Case("fsdp2", "qwen3", "disabled", packed=True, extended=False),
    "megatron": Case("megatron", "qwen3moe", "disabled", extended=False, distributed=True),
}
PHASES = ("reshard", "old_log_prob", "ref", "update")
SLOW, STOPPED, UNCOUNTED, WAYS = "slow", "stopped", "uncounted", ("slow", "stopped", "uncounted")
# Time of one micro batch, or of one weight in the reshard, as a share of the phase's limit. A phase has at least two.
SHARES = {SLOW: 0.9, STOPPED: 1.1, UNCOUNTED: 0.9}
LIMITS = WatchSettings()


class Clock:
    """A clock that advances only with the work; it sends heartbeats and checks them as its seconds pass."""

    def __init__(self) -> None:
        self.unit_s, self.now, self.serial, self.named = 0.0, 0.0, 0, list[str]()
        self.watch = Watch(LIMITS, 2, lambda: self.now)

    def beat(self) -> None:
        self.serial += 1
        own, waiting = process_signs(), Signs()
        waiting._phases = list(own._phases)
        for name, signs, where in (
            (TRAINER, Signs(), "waits in ray.get"),
            ("0", own, "at model.py:7 in forward"),
            ("1", waiting, "waits in all_reduce"),
        ):
            self.watch.hear(signs.now(name, self.serial, where))
        self.named += [f"{stop.name} {stop.phase}" for stop in self.watch.stopped()]

    def spend(self) -> None:
        self.beat()
        for _ in range(int(self.unit_s // LIMITS.interval_s)):
            self.now += LIMITS.interval_s
            self.beat()


CLOCK = Clock()


class Slow:
    """A base class placed before a training engine's, so that each micro batch takes time."""

    def forward_step(self, *arguments: Any, **named: Any) -> Any:
        CLOCK.spend()
        return super().forward_step(*arguments, **named)  # type: ignore[misc]  # of the engine


def run_phase(actor: Any, reference: Any, phase: str, packed: bool) -> None:
    data = batch(packed)
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=1)
    if phase == "reshard":
        for _ in actor.get_per_tensor_param()[0]:
            CLOCK.spend()
    elif phase == "update":
        with actor.train_mode():
            actor.train_batch(data, loss_of)
    else:
        engine = reference if phase == "ref" else actor
        with engine.eval_mode():
            engine.infer_batch(data)


@contextmanager
def counted(way: str) -> Iterator[None]:
    """Disable the progress counter within the block if `way` is "uncounted"."""
    if way == UNCOUNTED:
        with mock.patch.object(Signs, "progress"):
            yield
    else:
        yield


def found_of(folder: Path, case: Case) -> dict[str, Any]:
    actor = engine_of(folder / case.model, case)
    reference = engine_of(folder / case.model, case, trains=False)
    found: dict[str, Any] = {}
    for phase in PHASES:
        found[phase] = {}
        for way in WAYS:
            CLOCK.unit_s, CLOCK.named = SHARES[way] * getattr(LIMITS.warn_s, phase), []
            with counted(way):
                run_phase(actor, reference, phase, case.packed)
            found[phase][way] = sorted(set(CLOCK.named))
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return found


def main(folder: Path) -> None:
    import verl_plugin.megatron_float32  # noqa: F401

    for backend in ENGINES:
        extend_engine(backend, Slow)
    import verl_plugin.heartbeats.engines  # noqa: F401  (around the slow ones)

    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    found = {name: found_of(folder, case) for name, case in ENGINES.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
