"""Sums of verl's metrics over ranks, which must all report the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from post_training.report.run_error import RunError


class ReportsDifferError(RunError):
    """Ranks report different metrics of one update; the message is one sentence."""


def sums_over_ranks(
    found: Mapping[str, float], known: Sequence[str], device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Return the sum of every metric over the ranks of `group`, in float32.

    Collective: one all-reduce whose size and order depend only on `known`, whatever this rank has found, so that a
    metric of one rank is never added to a different metric of another.

    Args:
        found: this rank's metrics, each under one of the names in `known`.
        known: all names, the same on every rank.
        device: where the reduction runs.
        group: the ranks; None for all.

    Raises:
        ReportsDifferError: some ranks have a metric and others do not; raised on every rank.
    """
    values = [float(found.get(name, 0.0)) for name in known] + [float(name in found) for name in known]
    summed = torch.tensor(values, dtype=torch.float32).to(device)
    dist.all_reduce(summed, group=group)
    sums, ranks = summed.view(2, len(known)).tolist()
    everywhere = dist.get_world_size(group)
    for name, count in zip(known, ranks, strict=True):
        if 0 < count < everywhere:
            raise ReportsDifferError(
                f"{name} is reported by {int(count)} of {everywhere} ranks that train together. Use the same code and "
                "settings on every node; scripts/doctor.py --ray ADDRESS compares them"
            )
    return {name: value for name, value in zip(known, sums, strict=True) if name in found}
