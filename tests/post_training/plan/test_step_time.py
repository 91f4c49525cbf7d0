"""The modelled step predicts what the recipe published beside the rows that constants were fitted on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from unittest import mock

import pytest

from post_training.plan import step_time
from post_training.plan.step_time import describe_time, published_checks, published_step, step_seconds
from post_training.report.published import ROWS
from tests.post_training.plan.test_plan import MODEL
from tests.scripts.cluster_files import ROOT, load_script

WITHIN = 0.10
CHECKS = published_checks()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_published_figure_is_predicted(check):
    assert abs(check.error) <= WITHIN, f"{check.modelled:.1f} for {check.published}"


@pytest.mark.parametrize("true_weights", [True, False])
def test_the_fitted_stages_are_those_of_the_rows(true_weights):
    spent = ROWS[0 if true_weights else 1].figures.seconds
    modelled = step_seconds(published_step(true_weights))
    for stage in ("ref", "update", *([] if true_weights else ["rollout", "reshard"])):
        assert modelled[stage] == pytest.approx(spent[stage])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AGREEMENT_S", {"gloo": 0.003, "hccl": 0.003}),
        ("SKEW_S", {"ref": (1.0, 1.0), "update": (5.0, 5.0)}),
        ("LADDER_MS", {"transpose and cumsum": 0.0, "streams": 0.0, "exchange and KV cache NZ": 0.0}),
    ],
)
def test_without_a_published_constant_some_prediction_fails(name, value):
    """The control: the predictions follow from the constants."""
    step_time._fitted.cache_clear()
    try:
        with mock.patch.object(step_time, name, value):
            assert any(abs(check.error) > WITHIN for check in published_checks())
    finally:
        step_time._fitted.cache_clear()


def test_more_layers_recomputed_fewer_dies_and_more_agreements_take_longer():
    step = published_step(true_weights=True)
    seconds = step_seconds(step)
    assert step_seconds(replace(step, recomputed=8))["update"] > seconds["update"]
    assert step_seconds(replace(step, dies=128, dp=4))["ref"] > seconds["ref"]
    assert step_seconds(replace(step, a_forward=2 / 16))["rollout"] < seconds["rollout"]
    assert step_seconds(replace(step, balanced=True))["update"] < seconds["update"]


@pytest.mark.parametrize("dies", [1, 2, 16, 256, 4096])
def test_every_cluster_has_a_step(dies):
    sizes = {"rollout_tp": min(2, dies), "rollout_ep": min(256, dies), "pp": min(8, dies), "dp": max(1, dies // 32)}
    text = describe_time(replace(published_step(true_weights=False), dies=dies, **sizes))
    assert text.startswith("modelled step") and "largest part: " in text


def plan(capsys, tmp_path, nodes, dies_per_node, *arguments):
    cluster = tmp_path / "cluster.env"
    cluster.write_text(f"NODES={nodes}  # nodes\nDIES_PER_NODE={dies_per_node}  # dies\n")
    line = ["--config-name", "deepseek_v3_256die_true_weight", "--model", str(MODEL), "--time"]
    code = load_script(ROOT / "scripts" / "plan.py").main([*line, "--cluster", str(cluster), *arguments])
    return code, capsys.readouterr()


def test_the_command_models_the_job_on_the_clusters_dies(capsys, tmp_path):
    code, printed = plan(capsys, tmp_path, 16, 16, "--response-tokens", "1576.6")
    assert code == 0 and "modelled step, 256 dies" in printed.out
    code, printed = plan(capsys, tmp_path, 1, 1, "--json")
    assert code == 0 and set(json.loads(printed.out)) == set(step_time.STAGES)


@pytest.mark.parametrize(
    ("nodes", "arguments", "sentence"),
    [
        (257, (), "describes 4112 dies; the model of a step reaches to 4096"),
        ("<nodes>", (), "NODES in .* is '<nodes>': give a number from 1 to 4096"),
        (16, ("--response-tokens", "5000"), "--response-tokens 5000 must lie within"),
        (16, ("--response-tokens", "nan"), "--response-tokens nan must lie within"),
    ],
)
def test_a_bad_value_is_one_sentence(capsys, tmp_path, nodes, arguments, sentence):
    code, printed = plan(capsys, tmp_path, nodes, 16, *arguments)
    assert code == 2 and not printed.out
    assert re.search(sentence, printed.err)
