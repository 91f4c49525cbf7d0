"""The step time model predicts the recipe's published rows that its constants were not fitted on."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import pytest

from post_training.plan.step_time import model
from post_training.plan.step_time.job import ALIKE, Cluster
from post_training.plan.step_time.model import STAGES, Constants, fit, fitted, modelled, step_parts, step_seconds
from post_training.plan.step_time.published import PUBLISHED_CLUSTER, given, published_job, rows
from post_training.plan.step_time.rollout import Moment
from post_training.report.published import ROWS
from tests.scripts.cluster_files import ROOT

WITHIN = 0.10
HELD_OUT = [row for row in rows() if row.use == "held out"]
MISSED = [row for row in rows() if row.use == "missed"]
DOCUMENTS = [ROOT / "docs" / name for name in ("rollout.md", "rollout.zh.md")]


def error(row, constants=None):
    return modelled(row, constants) / row.value - 1


@pytest.mark.parametrize("row", HELD_OUT, ids=lambda row: row.name)
def test_held_out_number_is_predicted(row):
    assert not row.fits
    assert abs(error(row)) <= WITHIN, f"{modelled(row):.1f} for {row.value}"


@pytest.mark.parametrize("row", MISSED, ids=lambda row: row.name)
def test_a_number_that_is_missed_says_why(row):
    assert abs(error(row)) > WITHIN, "the model reaches it: hold it out"
    assert row.why


def test_every_fitted_constant_has_one_row_and_meets_it():
    found = [row for row in rows() if row.use == "fitted"]
    assert sorted(row.fits for row in found) == sorted(
        field.name for field in fields(Constants) if field.name != "given"
    )
    for row in found:
        assert modelled(row) == pytest.approx(row.value)
        assert 0 < getattr(fitted(), row.fits) < float("inf")


def test_the_rows_are_those_of_the_recipes_table():
    for published, name in zip(ROWS, ("true", "random"), strict=True):
        job, statistics = published_job(name), published.statistics
        lengths = (statistics.sequences, statistics.prompt_tokens, statistics.response_tokens)
        assert (job.sequences, job.prompt_tokens, job.response_tokens) == lengths
        stages = dict(statistics.seconds) | {"offload": statistics.seconds["rest"]}
        measured = [row for row in rows() if row.job == job and re.fullmatch(r"RECIPE 1\.4\.\d", row.source)]
        assert {row.of for row in measured} == {"rollout", "ref", "reward", "update", "reshard", "offload"}
        for row in measured:
            assert row.value == stages[row.of]


@pytest.mark.parametrize(
    ("term", "changed", "missed"),
    [
        ("agreements", {"agreement_gloo": 0.003}, "ladder: exchange, KV cache in NZ"),
        ("graphs", {"graph_of_layer": 0.0}, "ladder: without graphs"),
        (
            "optimizations",
            {"transpose_of_layer": 0.0, "streams": 0.0, "exchange": 0.0, "cache_nz": 0.0},
            "ladder: graphs",
        ),
    ],
)
def test_without_one_of_its_terms_the_model_misses(term, changed, missed):
    """Control: without the term, even refitted constants miss a prediction."""
    constants = fit(replace(given(), **changed))
    misses = {row.name for row in rows() if row.use == "held out" and abs(error(row, constants)) > WITHIN}
    assert missed in misses, f"{term} decides nothing; missed are {misses}"


GAINS = [row for row in HELD_OUT if row.of == "rollout gain"]


def test_the_four_published_gains_are_held_out():
    """No constant is fitted on DeepSeek-V3's 6482, 2861 and 2291 s or Qwen3-235B's 10213, 7841 and 6102 s."""
    published = [6482 / 2861, 2861 / 2291, 10213 / 7841, 7841 / 6102]
    assert [row.value for row in GAINS] == pytest.approx(published, abs=5e-4)
    fitted_rows = [row for row in rows() if row.use == "fitted"]
    assert not {id(row.job) for row in fitted_rows} & {id(row.job) for row in GAINS}
    assert not [row.name for row in fitted_rows if row.value in (6482, 2861, 2291, 10213, 7841, 6102)]
    with mock.patch.object(model, "rows", lambda: tuple(fitted_rows)):
        alone = fit(given())
    assert alone == fitted()
    for row in GAINS:
        assert abs(error(row, alone)) <= WITHIN, f"{row.name}: {modelled(row, alone):.3f} for {row.value}"


def test_operators_regardless_of_rows_miss_the_gains():
    """Control: with constants that only charge per layer, capturing several graphs gains almost nothing."""
    constants = replace(fitted(), row=0.0, grouped_row=0.0, given=replace(given(), scheduling=0.0))
    several = [row for row in GAINS if "several graphs over one" in row.name]
    assert len(several) == 2
    for row in several:
        assert error(row, constants) < -WITHIN, f"{row.name}: {modelled(row, constants):.3f} for {row.value}"


def test_empty_rows_at_experts_are_what_one_graph_cost():
    (row,) = (row for row in GAINS if row.name.startswith("DeepSeek-V3") and row.name.endswith("over one"))
    masked = [replace(job, empty_rows_routed=False) for job in (row.job, row.slower)]
    assert error(replace(row, job=masked[0], slower=masked[1])) < -WITHIN


def test_empty_rows_by_hand():
    """In each of 58 MoE layers, 1000 empty rows of 7168 bfloat16 elements are sent and returned at 196 GB/s."""
    job = replace(published_job("long"), rollout_ep=256)
    moment = Moment(steps=1.0, slots=64, cached_tokens=0.0, empty=1000.0)
    seconds = model._routed(job, PUBLISHED_CLUSTER, given(), moment)
    assert seconds == pytest.approx(58 * 2 * 1000 * 7168 * 2 / 196e9)
    halved = model._routed(replace(job, rollout_ep=128), PUBLISHED_CLUSTER, given(), moment)
    assert halved == pytest.approx(seconds / 2), "each of two models has half of them"
    assert model._routed(replace(job, empty_rows_routed=False), PUBLISHED_CLUSTER, given(), moment) == 0.0


def test_samples_of_a_prompt_are_as_alike_as_published():
    """ALIKE was chosen to match this value: 0.2 less or 0.1 more fits it worse."""
    (row,) = (row for row in rows() if "side by side" in row.name)

    def far(alike):
        jobs = [replace(job, alike=alike) for job in (row.job, row.slower)]
        return abs(error(replace(row, job=jobs[0], slower=jobs[1])))

    assert far(ALIKE) == abs(error(row)) < 0.03
    assert far(ALIKE - 0.2) > far(ALIKE) < far(ALIKE + 0.1)


def test_rows_that_stand_beside_say_their_conditions():
    (row,) = (row for row in rows() if row.use == "beside")
    assert row.why and row.value == 210 and row.cluster.dies == 384
    assert row.job.sequences == 384 * 32 and row.job.longest == 2048 and row.job.longest_prompt == 1024


def test_without_skew_through_the_driver_both_stages_miss():
    constants = replace(fitted(), driver_bytes=float("inf"))
    for stage in ("ref", "update"):
        (row,) = (row for row in HELD_OUT if row.name == f"{stage}, data through the driver")
        assert abs(error(row, constants)) > WITHIN


def test_what_costs_more_takes_longer():
    job, cluster = published_job("true"), PUBLISHED_CLUSTER
    seconds = step_seconds(job, cluster)

    def changed(stage, on=cluster, **changes):
        return step_seconds(replace(job, **changes), on)[stage] / seconds[stage]

    assert changed("update", recomputed=8) > 1
    assert changed("update", balanced=True) < 1
    assert changed("update", micro=64) > 1
    assert changed("ref", Cluster(128), dp=4) > 1
    assert changed("ref", micro_reference=64) > 1
    assert changed("rollout", a_forward=2 / 16) < 1
    assert changed("rollout", without=()) < 1
    alike = {"without": (), "agreements": "hccl"}
    assert changed("rollout", rollout_ep=256, **alike) < changed("rollout", **alike)
    assert changed("offload", rollout_ep=256) < 1
    assert step_seconds(replace(job, old_log_prob=True), cluster)["old_log_prob"] == pytest.approx(seconds["ref"])


def test_a_pipelines_bubble_by_hand():
    """16 micro batches take 23 turns through 8 equal stages, and 16 through one stage."""
    job = replace(published_job("random"), sequences=16, dp=1, micro=1, pp=8, stage_layers=61 / 8)
    whole = replace(job, pp=1, stage_layers=61)
    deep, flat = (step_parts(each, PUBLISHED_CLUSTER)["update"]["computing"] for each in (job, whole))
    assert deep / flat == pytest.approx(23 / 16)


def test_links_are_slower_beyond_a_supernode():
    job = published_job("random")
    near, far = (step_parts(job, Cluster(dies))["reshard"]["links"] for dies in (768, 1024))
    assert far / near == pytest.approx(196 / 25)
    assert step_parts(job, Cluster(1))["reshard"]["links"] == 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_document_shows_what_the_model_says(document: Path):
    section = document.read_text().rpartition("\n## ")[2]
    table = re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \| [-+]?[\d.]+ % \|$", section, re.MULTILINE)
    shown = [row for row in rows() if row.use != "fitted"]
    assert [(published, value) for _, published, value in table] == [
        (f"{row.value:g}", shown_number(modelled(row))) for row in shown
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_document_says_what_other_choices_would_give(document: Path):
    """Masks, agreements and likeness are not published, so each document gives the gains for other choices."""

    def gains(constants=None, **changes):
        changed = [(replace(row.job, **changes), replace(row.slower, **changes)) for row in GAINS]
        made = [replace(row, job=job, slower=slower) for row, (job, slower) in zip(GAINS, changed, strict=True)]
        return [f"{modelled(row, constants):.2f}" for row in made]

    (full,) = (row for row in rows() if row.name == "rollout, random weights")
    table = replace(fitted(), given=replace(given(), scheduling=0.0), row=0.022 / 63 / 61, layer=0.0)
    table = replace(table, layer=(full.value - modelled(full, table)) / 3072 / 61)
    section = document.read_text().rpartition("\n### ")[2]
    few, many = gains(alike=0.5), gains(alike=0.9)
    said = [gains(empty_rows_routed=False)[0], *gains(agreements="gloo"), *few, *many, *gains(table)[:2]]
    assert not [number for number in said if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", section)]


def shown_number(value):
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def test_the_stages_are_all_there():
    assert set(step_seconds(published_job("random"), PUBLISHED_CLUSTER)) == set(STAGES)
