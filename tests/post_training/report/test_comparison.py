"""Comparison of two runs: paired differences with calibrated intervals, and differing settings."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from post_training.estimates import block_bootstrap, bootstrap
from post_training.report import LoggedStep, ReportError
from post_training.report.comparison import FEWEST_STEPS, differences, render_comparison, write_comparison
from tests.html_pages import StrictPage
from tests.post_training.report.test_run_page import write_run


def records(values: dict[int, float | None], name: str = "critic/score/mean") -> list[LoggedStep]:
    return [LoggedStep(step, 0.0, {name: value}) for step, value in values.items()]


def test_differences_are_of_steps_that_both_runs_made():
    """Only the first run has step 1, only the second has step 4, and at step 3 the second is not finite."""
    (found,) = differences(records({1: 9.0, 2: 1.0, 3: 5.0, 5: 2.0}), records({2: 4.0, 3: None, 4: 7.0, 5: 3.0}))
    assert (found.steps, found.first, found.second, found.difference.value) == (2, 1.5, 3.5, 2.0)
    assert not found.has_interval and not found.is_clear
    assert differences(records({1: 1.0}), records({2: 1.0})) == []


def test_pairing_finds_what_the_noise_of_both_runs_hides():
    """Both runs rise from 0.2 to 0.9 with the same noise from their prompts; the second is 0.02 higher."""
    noise = np.random.default_rng(1)
    first = np.linspace(0.2, 0.9, 40) + 0.1 * noise.standard_normal(40)
    second = first + 0.02 + 0.01 * noise.standard_normal(40)
    (found,) = differences(*(records(dict(enumerate(each.tolist(), 1))) for each in (first, second)))
    assert found.is_clear and found.difference.low < 0.02 < found.difference.high
    unpaired = bootstrap(second.tolist()).high - bootstrap(second.tolist()).low
    assert found.difference.high - found.difference.low < unpaired / 10
    (same,) = differences(*[records(dict(enumerate(first.tolist(), 1)))] * 2)
    assert same.difference.value == 0 and not same.is_clear


def test_blocks_cover_means_of_steps_that_follow_each_other():
    """For an AR(1) process with coefficient 0.5, 95 % intervals should contain the mean, 0, that often.

    Resampling one by one, as if steps were independent, contains it far less often.
    """
    drawn, trials, length = np.random.default_rng(0), 200, 100
    held = {"blocks": 0, "one by one": 0}
    for trial in range(trials):
        values = [0.0]
        for _ in range(length + 50):
            values.append(0.5 * values[-1] + drawn.standard_normal())
        steps = values[-length:]
        for kind, found in (("blocks", block_bootstrap(steps, trial)), ("one by one", bootstrap(steps, trial))):
            held[kind] += found.low <= 0 <= found.high
    assert held["blocks"] >= 0.85 * trials > 0.80 * trials > held["one by one"], held


def test_interval_of_independent_values_is_the_bootstraps():
    values = np.random.default_rng(3).standard_normal(30).tolist()
    assert block_bootstrap(values, 5, block=1) == bootstrap(values, 5)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of eight steps on copies of the same data, with different learning rates."""
    made = []
    for name, rate in (("first", 1e-6), ("second", 2e-6)):
        run = write_run(tmp_path / name, steps=FEWEST_STEPS, **{"actor/grad_norm": rate})
        (run / "train.parquet").write_bytes(b"the same")
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["data"] = {"seed": 7, "train_files": [str(run / "train.parquet")]}
        config["actor_rollout_ref"]["actor"] = {"optim": {"lr": rate}}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        made.append(run)
    return made[0], made[1]


def test_page_shows_both_curves_intervals_and_settings(runs):
    page = render_comparison(*runs)
    text = " ".join(StrictPage(page).text.split())
    assert "first and second" in text and "8 and 8 steps. Both runs train on the same prompts at each step." in text
    assert "actor/grad_norm 8 1.00e-06 2.00e-06 1.00e-06 [1.00e-06, 1.00e-06]" in text
    assert "actor_rollout_ref.actor.optim.lr 1e-06 2e-06" in text and "hidden-secret" not in page
    assert text.count("data.train_files") == 1 and "trainer.nnodes" not in text
    reward = page.partition("<h3>Reward</h3>")[2].partition("</section>")[0]
    assert reward.count("<polyline") == 2 and "first" in reward and "second" in reward


def test_secrets_that_differ_are_not_settings_that_differ(runs):
    """Two secrets that differ are not listed among the differing settings."""
    for number, run in enumerate(runs):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["trainer"]["wandb_api_key"] = f"hidden-secret-{number}"
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    page = render_comparison(*runs)
    assert "hidden-secret" not in page and "wandb_api_key" not in page


def test_page_says_that_prompts_differ(runs):
    (runs[1] / "train.parquet").write_bytes(b"other")
    assert "a step of one has other prompts" in render_comparison(*runs)
    (runs[1] / "train.parquet").unlink()
    assert "a step of one has other prompts" in render_comparison(*runs)


@pytest.mark.parametrize(
    "data",
    [
        {"seed": 8},
        {"shuffle": False},
        {"train_batch_size": 64},
        {"gen_batch_size": 96},
        {"sampler": {"class_path": "pkg://own"}},
        {"train_files": ["/nowhere/else.parquet"]},
        {"train_files": []},
    ],
)
def test_page_says_that_the_order_of_prompts_differs(runs, data):
    config = yaml.safe_load((runs[1] / "config.yaml").read_text())
    config["data"] |= data
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config))
    assert "a step of one has other prompts" in render_comparison(*runs)


@pytest.mark.parametrize("rise, clear", [(0.01, True), (-0.01, True), (0.0, False)])
def test_difference_is_clear_on_either_side_of_0(rise, clear):
    """The difference is second minus first, and a fall is as clear as a rise."""
    noise = 0.005 * np.random.default_rng(2).standard_normal(30)
    first = records(dict.fromkeys(range(1, 31), 0.5))
    second = records({step: 0.5 + rise + noise[step - 1] - noise.mean() for step in range(1, 31)})
    (found,) = differences(first, second)
    assert found.difference.value == pytest.approx(rise, abs=1e-12) and found.is_clear == clear
    assert found.difference.low <= rise <= found.difference.high


def test_runs_that_cannot_be_compared_are_rejected(runs, tmp_path):
    first, second = runs
    with pytest.raises(ReportError, match="are the same run. Pass two"):
        write_comparison(first, first.parent / "." / "first")
    with pytest.raises(ReportError, match="is not a folder"):
        write_comparison(first, tmp_path / "absent")
    line = json.loads((second / "metrics.jsonl").read_text().splitlines()[0])
    (second / "metrics.jsonl").write_text(json.dumps(line | {"step": 100}) + "\n")
    with pytest.raises(ReportError, match="no metric at the same step. Pass two runs that overlap"):
        write_comparison(first, second)
    assert not (second / "comparison.html").exists()


def test_equal_folder_names_are_distinguished(tmp_path):
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs.append(write_run(tmp_path / name / "run"))
    assert "a/run and b/run" in render_comparison(*runs)
