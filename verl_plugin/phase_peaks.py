"""Meters the device memory of each phase of a step in verl's training engines on NPUs.

    actor_rollout_ref.model.external_lib=[...,verl_plugin.phase_peaks]

It comes last: a method that another module puts in place of an engine's would not call it.

An update reports `memory/peak_bytes/PHASE`, the most that one die had in use, over all ranks, and
`memory/allocated_bytes/PHASE`, what was left when the phase ended:

    reshard       weights go to the rollout, whose worker has its own on the die
    rollout       the worker is awake, KV cache and all (metered by the worker where alltoallv moves weights)
    idle          it sleeps, and no engine has brought anything back yet
    old_log_prob, ref, update

verl puts `actor/` before the names. torch's own peaks begin anew with each phase, so `perf/max_memory_allocated_gb` is
that of the update.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric

from post_training.device_phases import PhaseMemory, PhaseMeter, used_bytes
from post_training.report.metrics import ALLOCATED_BYTES_PREFIX, PEAK_BYTES_PREFIX
from verl_plugin.engines import extend_engine, has_engine

RESHARD, ROLLOUT, IDLE = "reshard", "rollout", "idle"
OLD_LOG_PROB, REF, UPDATE = "old_log_prob", "ref", "update"
_PHASES = (RESHARD, ROLLOUT, IDLE, OLD_LOG_PROB, REF, UPDATE)
# One for the process, in which actor and reference are two engines.
_METER = PhaseMeter()


class PhasePeaks:
    """Mixin that `extend_engine` puts before a training engine of verl."""

    engine_config: Any

    def train_mode(self, **named: Any) -> Any:
        """As upstream."""
        _enter(UPDATE)
        return super().train_mode(**named)  # type: ignore[misc]  # of the engine that this extends

    def eval_mode(self, **named: Any) -> Any:
        """As upstream."""
        _enter(REF if self.engine_config.forward_only else OLD_LOG_PROB)
        return super().eval_mode(**named)  # type: ignore[misc]  # of the engine that this extends

    def get_per_tensor_param(self, **named: Any) -> Any:
        """As upstream. The phase goes on until the next pass of an engine: in between this process does nothing."""
        _enter(RESHARD)
        return super().get_per_tensor_param(**named)  # type: ignore[misc]  # of the engine that this extends

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """As upstream; the last update of a step reports. Collective over all ranks."""
        output = super().train_batch(data, loss_function)  # type: ignore[misc]  # of the engine that this extends
        if tu.get(data, key="update_lr_scheduler", default=False):
            found = self._largest()
            if self.is_mp_src_rank_with_outputs():  # type: ignore[attr-defined]  # of the engine
                # Not the integers themselves: docs/upstream/verl-metric-types.md.
                output["metrics"] |= {
                    name: Metric(value=float(value), aggregation=AggregationType.MAX) for name, value in found.items()
                }
        return output

    def _largest(self) -> dict[str, int]:
        """Return the metrics since the last report, the largest of all ranks; phases that no rank had are left out."""
        _METER.end()
        if hasattr(self, "rollout_memory"):  # where alltoallv moves weights
            for phase, memory in self.rollout_memory().items():
                _METER.keep(phase, memory)
        own = dict.fromkeys(_PHASES, PhaseMemory(0, 0)) | _METER.take()
        values = [[own[phase].peak, own[phase].end] for phase in _PHASES]
        largest = torch.tensor(values, dtype=torch.int64, device=get_device_id())
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found: dict[str, int] = {}
        for phase, (peak, end) in zip(_PHASES, largest.tolist(), strict=True):
            if peak:
                found |= {PEAK_BYTES_PREFIX + phase: peak, ALLOCATED_BYTES_PREFIX + phase: end}
        return found


def _enter(phase: str) -> None:
    """Begin a phase of this process. After a reshard the worker has finished the rollout and sleeps: `idle` first."""
    if _METER.phase == RESHARD != phase:
        _METER.end()
        _METER.keep(IDLE, PhaseMemory(used_bytes(), used_bytes()))
    _METER.begin(phase)


for _backend in ("fsdp2", "megatron"):
    if has_engine(_backend):
        extend_engine(_backend, PhasePeaks)
