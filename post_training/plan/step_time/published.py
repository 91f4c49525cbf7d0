"""Reads published.toml: constants with their sources, and published numbers that are fitted or held out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from post_training.models.qwen3_moe import FAMILY as QWEN3_MOE
from post_training.plan.step_time.job import Cluster, StepJob
from post_training.report.published import CARDS, DEEPSEEK_V3

Use = Literal["fitted", "held out", "repeated", "missed", "beside"]
PUBLISHED_CLUSTER = Cluster(dies=2 * CARDS)
QWEN3_235B: Mapping[str, Any] = {**QWEN3_MOE.published["qwen3-235b-a22b"], "model_type": "qwen3_moe"}
_MODELS = {"DeepSeek-V3": DEEPSEEK_V3, "Qwen3-235B-A22B": QWEN3_235B}
_FILE = Path(__file__).with_name("published.toml")


@dataclass(frozen=True)
class Given:
    """Constants that a source states; published.toml has their units and sources."""

    die_bytes_a_second: float
    link_bytes_a_second: float
    far_link_bytes_a_second: float
    supernode_dies: float
    agreement_gloo: float
    agreement_hccl: float
    scheduling: float
    scheduling_rows: float
    graph_of_layer: float
    transpose_of_layer: float
    streams: float
    exchange: float
    cache_nz: float
    skew_dies_ref: float
    skew_dies_update: float


@dataclass(frozen=True)
class Row:
    """One published number, and the job and the dies with which it was measured.

    Attributes:
        slower: the baseline job, if the number is a gain.
        fits: the constant that is fitted to the number, if any.
    """

    name: str
    use: Use
    of: str
    value: float
    source: str
    job: StepJob
    cluster: Cluster = PUBLISHED_CLUSTER
    slower: StepJob | None = None
    fits: str = ""
    why: str = ""


@cache
def given() -> Given:
    table = _read()["given"]
    return Given(**{field.name: table[field.name]["value"] for field in fields(Given)})


@cache
def rows() -> tuple[Row, ...]:
    return tuple(_row(row) for row in _read()["rows"])


def _row(row: Mapping[str, Any]) -> Row:
    values = {key: value for key, value in row.items() if key not in ("conditions", "changes", "slower")}
    conditions, dies = row["conditions"], _read()["conditions"][row["conditions"]].get("dies", PUBLISHED_CLUSTER.dies)
    slower = published_job(conditions, row["slower"]) if "slower" in row else None
    job = published_job(conditions, row.get("changes", {}))
    return Row(**values, job=job, cluster=Cluster(dies), slower=slower)


def published_job(conditions: str, changes: Mapping[str, Any] | None = None) -> StepJob:
    """Return the job of published rows by the name of their conditions, with some fields changed."""
    values = _read()["conditions"][conditions] | dict(changes or {})
    values |= {key: tuple(values[key]) for key in ("without", "graph_sizes") if key in values}
    model = _MODELS[values.pop("model", "DeepSeek-V3")]
    values.pop("dies", None)
    return StepJob(model=model, **values)


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
