"""The modelled step predicts what the recipe published beside the rows that constants were fitted on."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from post_training.plan.step_time.job import Cluster
from post_training.plan.step_time.model import STAGES, Constants, fit, fitted, modelled, step_parts, step_seconds
from post_training.plan.step_time.published import PUBLISHED_CLUSTER, given, published_job, rows
from post_training.report.published import ROWS
from tests.scripts.cluster_files import ROOT

WITHIN = 0.10
HELD_OUT = [row for row in rows() if row.use == "held out"]
MISSED = [row for row in rows() if row.use == "missed"]
DOCUMENTS = [ROOT / "docs" / name for name in ("rollout.md", "rollout.zh.md")]


def error(row, constants=None):
    return modelled(row, constants) / row.value - 1


@pytest.mark.parametrize("row", HELD_OUT, ids=lambda row: row.name)
def test_a_figure_that_is_held_out_is_predicted(row):
    assert not row.fits
    assert abs(error(row)) <= WITHIN, f"{modelled(row):.1f} for {row.value}"


@pytest.mark.parametrize("row", MISSED, ids=lambda row: row.name)
def test_a_figure_that_is_missed_says_why(row):
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
        job, figures = published_job(name), published.figures
        lengths = (figures.sequences, figures.prompt_tokens, figures.response_tokens)
        assert (job.sequences, job.prompt_tokens, job.response_tokens) == lengths
        stages = dict(figures.seconds) | {"offload": figures.seconds["rest"]}
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
    """The control: the predictions follow from the constants, refitted without the term."""
    constants = fit(replace(given(), **changed))
    misses = {row.name for row in rows() if row.use == "held out" and abs(error(row, constants)) > WITHIN}
    assert missed in misses, f"{term} decides nothing; missed are {misses}"


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
    """16 micro batches through 8 equal stages take 23 turns, through one stage 16."""
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
        (f"{row.value:g}", f"{modelled(row):.1f}") for row in shown
    ]


def test_the_stages_are_all_there():
    assert set(step_seconds(published_job("random"), PUBLISHED_CLUSTER)) == set(STAGES)
