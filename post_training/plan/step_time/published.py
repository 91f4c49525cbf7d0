"""Reads published.toml: constants with their sources, and published figures that are fitted or held out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from post_training.plan.step_time.job import Cluster, StepJob
from post_training.report.published import CARDS, DEEPSEEK_V3

Use = Literal["fitted", "held out", "repeated", "missed"]
PUBLISHED_CLUSTER = Cluster(dies=2 * CARDS)
_FILE = Path(__file__).with_name("published.toml")


@dataclass(frozen=True)
class Given:
    """Constants that a source gives; units and sources stand in published.toml."""

    die_bytes_a_second: float
    link_bytes_a_second: float
    far_link_bytes_a_second: float
    supernode_dies: float
    agreement_gloo: float
    agreement_hccl: float
    scheduling: float
    graph_of_layer: float
    transpose_of_layer: float
    streams: float
    exchange: float
    cache_nz: float
    skew_dies_ref: float
    skew_dies_update: float


@dataclass(frozen=True)
class Row:
    """One published figure, and the job that it was measured with on 256 dies."""

    name: str
    use: Use
    of: str
    value: float
    source: str
    job: StepJob
    fits: str = ""
    why: str = ""


@cache
def given() -> Given:
    table = _read()["given"]
    return Given(**{field.name: table[field.name]["value"] for field in fields(Given)})


@cache
def rows() -> tuple[Row, ...]:
    return tuple(
        Row(
            **{key: value for key, value in row.items() if key not in ("conditions", "changes")},
            job=published_job(row["conditions"], row.get("changes", {})),
        )
        for row in _read()["rows"]
    )


def published_job(conditions: str, changes: Mapping[str, Any] | None = None) -> StepJob:
    """The job of the published rows with `random` or `true` weights, with some fields changed."""
    values = _read()["conditions"][conditions] | dict(changes or {})
    if "without" in values:
        values |= {"without": tuple(values["without"])}
    return StepJob(model=DEEPSEEK_V3, **values)


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
