"""The rehearsal on both engines with the same noise: a table of the metrics that differ, and why each may.

    python -m tests.npu_emulator.cann.side_by_side FOLDER [--steps 5] [--precision float32 | bfloat16]

FOLDER gets both runs; one that is there with all its steps is not run again. Ends with 1 where something differs that
nothing here explains.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from post_training.report import read_records
from tests.npu_emulator.cann.engine_process import ROOT

ENGINES = ("stand-in", "cann")
NOISE = Path(__file__).with_name("host_noise")


@dataclass(frozen=True)
class Reason:
    """Why metrics whose names begin with one of `prefixes` may differ, and by how much at most."""

    why: str
    prefixes: tuple[str, ...]
    relative: float = 0.0
    absolute: float = 0.0

    def covers(self, name: str, one: float, other: float) -> bool:
        room = self.absolute + self.relative * max(abs(one), abs(other)) if math.isfinite(self.relative) else math.inf
        return name.startswith(self.prefixes) and abs(one - other) <= room


SECONDS = Reason("seconds, and what is computed from them", ("timing", "perf/", "reshard/seconds"), math.inf)
BYTES = Reason("two allocators, with blocks and segments of their own", ("memory/",), math.inf)
FLOAT32 = (
    SECONDS,
    BYTES,
    Reason("sums over ranks are taken in another order", ("actor/grad_norm", "actor/kl_loss"), relative=1e-5),
    Reason(
        "itself the rounding of float32 in two models, on either engine",
        ("training/rollout_logprob_diff",),
        absolute=1e-5,
    ),
)
# Of the first steps: what rounds differently is trained on, and after three updates some tokens are others.
BFLOAT16 = (
    SECONDS,
    BYTES,
    Reason("numbers of 16 bits are rounded in other places", ("actor/grad_norm", "actor/kl_loss"), relative=0.02),
    Reason("itself the rounding of 16 bits in two models", ("training/rollout_logprob_diff",), absolute=0.1),
)
REASONS = {"float32": FLOAT32, "bfloat16": BFLOAT16}


@dataclass(frozen=True)
class Row:
    """A metric that differs in some step: the values of the step in which it does most, and the reason, if any."""

    name: str
    step: int
    values: tuple[float, float]
    why: str | None


def numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def compare(ones: list, others: list, reasons: tuple[Reason, ...]) -> tuple[list[str], list[Row]]:
    """Metrics that are equal in every step of two runs, and rows for the others. A metric that one run has in a step is
    NaN in the other's, which nothing explains."""
    pairs = [(one.step, numbers(one.metrics), numbers(other.metrics)) for one, other in zip(ones, others, strict=True)]
    names = sorted({name for _, one, other in pairs for name in one.keys() | other.keys()})
    equal, rows = [], []
    for name in names:
        those = [pair for pair in pairs if name in pair[1].keys() | pair[2].keys()]
        steps = [(step, one.get(name, math.nan), other.get(name, math.nan)) for step, one, other in those]
        unequal = [each for each in steps if each[1] != each[2]]
        if not unequal:
            equal.append(name)
            continue
        unexplained = [each for each in unequal if not any(reason.covers(name, *each[1:]) for reason in reasons)]
        step, *values = max(unexplained or unequal, key=lambda each: abs(each[1] - each[2]))
        why = None if unexplained else next(reason.why for reason in reasons if reason.covers(name, *values))
        rows.append(Row(name, step, (values[0], values[1]), why))
    return equal, rows


def table(equal: list[str], rows: list[Row]) -> Iterator[str]:
    yield f"{len(equal)} metrics are equal in every step, number for number: {', '.join(equal)}"
    for why in dict.fromkeys(row.why for row in rows):
        those = [row for row in rows if row.why == why]
        yield ""
        yield f"{len(those)} differ: {why or 'NOT EXPLAINED'}"
        yield f"  {'':42}{'step':>5}{ENGINES[0]:>24}{ENGINES[1]:>24}{'difference':>12}"
        for row in those:
            one, other = row.values
            yield f"  {row.name:42}{row.step:5}{one:24.12g}{other:24.12g}{other - one:12.1e}"


def rehearse(engine: str, folder: Path, steps: int, precision: str) -> list:
    """The steps of a rehearsal in `folder`, which is started if it is not there."""
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and len(read_records(metrics)) == steps:
        return read_records(metrics)
    command = [sys.executable, "-m", "rehearsal", "--engine", engine, "--steps", str(steps), "--output", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "NPU_EMULATOR_ENGINE"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{NOISE}"
    ended = subprocess.run(
        [*command, "--", f"actor_rollout_ref.overlay.precision={precision}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return read_records(metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--precision", choices=tuple(REASONS), default="float32")
    options = parser.parse_args()
    runs = [rehearse(engine, options.folder / engine, options.steps, options.precision) for engine in ENGINES]
    equal, rows = compare(*runs, REASONS[options.precision])
    print("\n".join(table(equal, rows)))
    if any(row.why is None for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
