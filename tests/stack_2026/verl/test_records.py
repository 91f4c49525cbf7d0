"""verl's own metrics become the records that the reports read; a run without log-prob comparison has failed."""

import json
from pathlib import Path

import pytest

from post_training.report import LoggedStep, read_records
from post_training.report.metrics import EXPERT_SETS_DIFFER, PEAK_BYTES_PREFIX
from rehearsal.stack_2026.records import LOG_PROB_DIFFERENCE, PROBABILITY_DIFFERENCE, RecordWriter
from rehearsal.stack_2026.stages import failure_of, lost_answers, probability_differences

GOOD = {PROBABILITY_DIFFERENCE: 0.01, "critic/score/mean": 0.5, "actor/grad_norm": 1.0, "actor/loss": 0.1}


def append(path: Path, step: int, **data: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "data": data}) + "\n")


def test_new_steps_are_appended_once(tmp_path):
    source, target = tmp_path / "verl.jsonl", tmp_path / "metrics.jsonl"
    times = iter([10.0, 20.0])
    writer = RecordWriter(source, target, clock=lambda: next(times))
    writer.update()
    append(source, 1, **{"critic/score/mean": 0.5, "name": "text"})
    writer.update()
    append(source, 2, **{"critic/score/mean": float("nan")})
    writer.update()
    writer.update()
    records = read_records(target)
    assert [(record.step, record.time) for record in records] == [(1, 10.0), (2, 20.0)]
    assert [record.metrics for record in records] == [{"critic/score/mean": 0.5}, {"critic/score/mean": None}]


def test_metrics_of_the_step_lose_the_prefix_of_the_update(tmp_path):
    source, target = tmp_path / "verl.jsonl", tmp_path / "metrics.jsonl"
    of_step = {EXPERT_SETS_DIFFER: 0.25, f"{PEAK_BYTES_PREFIX}ref": 5}
    given = {f"actor/{name}": value for name, value in of_step.items()}
    append(source, 1, **given, **{"actor/loss": 0.5, "rollout/n": 8})
    RecordWriter(source, target).update()
    [record] = read_records(target)
    assert record.metrics == of_step | {"actor/loss": 0.5, "rollout/n": 8}


def test_differences_are_the_largest_of_all_steps():
    records = [LoggedStep(step, 0.0, {PROBABILITY_DIFFERENCE: value}) for step, value in ((1, 0.2), (2, 0.1))]
    found = probability_differences(records)
    assert found.pop("rollout_prob_diff_max") == 0.2 and set(found.values()) == {None}


@pytest.mark.parametrize(
    ("changes", "steps", "words"),
    [
        ({}, 1, None),
        ({}, 2, "ended after 1 of 2 steps"),
        ({PROBABILITY_DIFFERENCE: None}, 1, "were not compared at step 1"),
        ({"actor/grad_norm": None}, 1, "actor/grad_norm is not a finite number at step 1"),
        ({LOG_PROB_DIFFERENCE: 9e-4}, 1, None),
        ({LOG_PROB_DIFFERENCE: 4.7}, 1, "at step 1: the mean log-probs of an answer differ by 4.70e+00 on average"),
    ],
)
def test_incomplete_and_unlike_runs_fail(tmp_path, changes, steps, words):
    found = failure_of(0, [LoggedStep(1, 0.0, GOOD | changes)], steps, "float32", tmp_path / "run.log")
    assert (found is None) if words is None else (words in found)


def test_bfloat16_may_compute_differently(tmp_path):
    assert failure_of(0, [LoggedStep(1, 0.0, GOOD | {LOG_PROB_DIFFERENCE: 0.01})], 1, "bfloat16", tmp_path) is None


# Metrics of a step of verl 0.9.1 with 32 prompts of 8 answers each.
STEP = {"perf/total_num_tokens": 3970, "prompt_length/mean": 7.0, "response_length/mean": 8.5078125}


@pytest.mark.parametrize(("batch", "n", "words"), [(32, 8, None), (33, 8, "256 of 264 answers"), (8, 8, None)])
def test_step_with_fewer_answers_than_asked_is_told(tmp_path, batch, n, words):
    composed = tmp_path / "config.yaml"
    composed.write_text(f"data: {{train_batch_size: {batch}}}\nactor_rollout_ref: {{rollout: {{n: {n}}}}}\n")
    found = lost_answers([LoggedStep(1, 0.0, STEP), LoggedStep(2, 0.0, GOOD)], composed)
    assert (found is None) if words is None else (words in found)


def test_seconds_of_the_weights_have_the_name_of_the_reports(tmp_path):
    source, target = tmp_path / "verl.jsonl", tmp_path / "metrics.jsonl"
    append(source, 1, **{"timing_s/update_weights": 0.5})
    RecordWriter(source, target).update()
    assert read_records(target)[0].metrics == {"timing_s/reshard": 0.5}


def test_failed_command_reported_by_its_log(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("line\nerror: no room\n")
    assert failure_of(1, [], 2, "float32", log) == "no room"
