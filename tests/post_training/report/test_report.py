"""From metrics.jsonl to summary.json and the charts; unmeasured values must not look measured."""

import json

import pytest
from matplotlib.figure import Figure

from post_training.report import LoggedStep, ReportError, RunFacts, read_records, summarise
from post_training.report.picture import draw
from post_training.report.summary import REWARD_WINDOW, moving_means

FACTS = RunFacts(seed=1, dies=4, wall_s=100.0, precision="bfloat16", startup_s=50.0)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def record(step, **metrics):
    return LoggedStep(step, 1000.0 + step, {name.replace("__", "/"): value for name, value in metrics.items()})


def test_records_come_back_and_a_line_in_writing_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = json.dumps({"step": 1, "time": 2.5, "metrics": {"critic/score/mean": 0.5}})
    path.write_text(f"{line}\n\n{line[:20]}")
    assert read_records(path) == [LoggedStep(1, 2.5, {"critic/score/mean": 0.5})]
    assert read_records(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("line", ["{", "[1]", '{"step": 1, "time": 1}', '{"step": "x", "time": 1, "metrics": {}}'])
def test_broken_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "time": 1, "metrics": {{}}}}\n{line}\n')
    with pytest.raises(ReportError, match="line 2 is not a step record"):
        read_records(path)


def test_rewards_are_means_of_the_first_and_last_five_steps():
    records = [record(step, critic__score__mean=step / 10) for step in range(1, 11)]
    summary = summarise(records, FACTS)
    assert summary["steps"] == 10 and summary["seed"] == 1 and summary["wall_s"] == 100.0
    assert summary["reward_first"] == pytest.approx(0.3)
    assert summary["reward_last"] == pytest.approx(0.8)


def test_prompts_are_totals_and_groups_with_gradient_those_of_the_last_five_steps():
    steps = range(1, 8)
    records = [
        record(
            step,
            sampling__generated_prompts=10 + step,
            sampling__trained_prompts=8,
            sampling__groups_with_gradient=step / 10,
            sampling__truncated_share=0.5 * (step % 2),
        )
        for step in steps
    ]
    summary = summarise(records, FACTS)
    assert (summary["generated_prompts"], summary["trained_prompts"]) == (98, 56)
    assert summary["groups_with_gradient"] == pytest.approx(0.5)
    assert summary["truncated_share"] == pytest.approx(2 / 7)


def test_stage_seconds_leave_out_the_first_step_and_count_nothing_twice():
    slow = record(1, timing_s__gen=90.0, timing_s__reshard=1.0, timing_s__step=100.0)
    steady = [record(step, timing_s__gen=3.0, timing_s__reshard=1.0, timing_s__step=4.0) for step in (2, 3)]
    summary = summarise([slow, *steady], FACTS)
    assert summary["stage_seconds"]["rollout"] == pytest.approx(2.0)
    assert summary["stage_seconds"]["reshard"] == pytest.approx(1.0)
    assert summary["step_seconds"] == pytest.approx(4.0)
    assert summarise([slow], FACTS)["stage_seconds"]["rollout"] == pytest.approx(89.0)


def test_step_seconds_with_and_without_saving_and_validation():
    """verl's step timer includes both. They happen every few steps, and the first step is not counted."""
    steps = [
        record(1, timing_s__step=50.0, timing_s__testing=40.0),
        record(2, timing_s__step=4.0),
        record(3, timing_s__step=9.0, timing_s__testing=3.0, timing_s__save_checkpoint=2.0),
    ]
    summary = summarise(steps, FACTS)
    assert (summary["step_seconds"], summary["step_seconds_training"]) == (6.5, 4.0)
    unknown = summarise([record(1), record(2, timing_s__testing=3.0)], FACTS)
    assert unknown["step_seconds_training"] is None


def test_unmeasured_is_none_and_never_zero():
    summary = summarise([record(1)], FACTS)
    unmeasured = ["reward_first", "reward_last", "rollout_logprob_diff_max", "weights_exact", "patches_applied",
                  "patches_effective", "peak_device_bytes", "device_memory", "collectives", "emulator",
                  "step_seconds", "step_seconds_training", "groups_with_gradient", "generated_prompts",
                  "trained_prompts", "truncated_share"]  # fmt: skip
    assert {name: summary[name] for name in unmeasured} == dict.fromkeys(unmeasured)
    assert set(summary["stage_seconds"].values()) == {None}
    assert json.loads(json.dumps(summary)) == summary


def test_one_inexact_step_makes_the_run_inexact():
    exact = [record(step, reshard__weights_exact=1.0) for step in (1, 2)]
    assert summarise(exact, FACTS)["weights_exact"] is True
    assert summarise([*exact, record(3, reshard__weights_exact=0.0)], FACTS)["weights_exact"] is False
    assert summarise([*exact, record(3)], FACTS)["weights_exact"] is True


def test_device_memory_of_the_last_step_in_the_order_of_its_phases():
    names = {"update": (30, 20), "rollout": (7, 6), "reshard": (9, 8)}
    last = {f"memory/peak_bytes/{phase}": peak for phase, (peak, _) in names.items()}
    last |= {f"memory/allocated_bytes/{phase}": end for phase, (_, end) in names.items()}
    summary = summarise([record(1, **{"memory/peak_bytes/update": 99.0}), LoggedStep(2, 1.0, last)], FACTS)
    assert summary["device_memory"] == [
        {"phase": "reshard", "peak_bytes": 9, "end_bytes": 8},
        {"phase": "rollout", "peak_bytes": 7, "end_bytes": 6},
        {"phase": "update", "peak_bytes": 30, "end_bytes": 20},
    ]


def test_statistics_of_the_decode_loop_and_of_samples_are_those_of_the_whole_run():
    metrics = {
        "rollout/agreements": 3.0,
        "rollout/decode_steps": 31.0,
        "rollout/slot_steps": 124.0,
        "rollout/slot_steps_bound": 70.0,
        "samples/collectives": 1.0,
    }
    summary = summarise([LoggedStep(n, float(n), metrics) for n in (1, 2)], FACTS)
    names = ("agreements", "decode_steps", "slot_steps", "slot_steps_bound", "data_collectives")
    assert [summary[name] for name in names] == [6, 62, 248, 140, 2]
    without = summarise([record(1)], FACTS)
    assert [without[name] for name in names] == [None] * 5


def test_bytes_of_the_driver_and_late_starts_are_means_without_the_first_step():
    steps = [
        LoggedStep(
            n,
            float(n),
            {"perf/driver_bytes_per_sample": 8.0 * n, "timing_start_skew/ref": n, "timing_start_skew/update": 1.0},
        )
        for n in (1, 2, 4)
    ]
    summary = summarise(steps, FACTS)
    assert summary["driver_bytes_per_sample"] == 24
    assert summary["start_skew_s"] == {"ref": 3, "update": 1}
    summary = summarise([record(1)], FACTS)
    assert summary["driver_bytes_per_sample"] is None and summary["start_skew_s"] is None


def test_every_phase_has_its_place_in_the_report():
    pytest.importorskip("torch_npu")
    from post_training.report.metrics import PHASES as reported
    from verl_patches.features.residency.phases import PHASES as declared

    assert tuple(declared) == reported


def test_worst_log_prob_difference_peaks_and_collectives():
    first = {"training/rollout_logprob_diff_max": 2e-4, "memory/peak_bytes/update": 10}
    first |= {"collectives/all_to_all/count": 3, "collectives/all_to_all/bytes": 100}
    second = {"training/rollout_logprob_diff_max": 1e-4, "memory/peak_bytes/update": 30}
    second |= {"memory/peak_bytes/rollout": 7, "collectives/all_to_all/count": 4}
    summary = summarise([LoggedStep(1, 0.0, first), LoggedStep(2, 1.0, second)], FACTS)
    assert summary["rollout_logprob_diff_max"] == 2e-4
    assert summary["peak_device_bytes"] == {"update": 30, "rollout": 7}
    assert summary["collectives"] == summary["overlay_collectives"] == {"all_to_all": {"count": 7, "bytes": 100}}
    everything = {"collectives": {"all_reduce": {"count": 9, "bytes": 1}}}
    counted_by_both = summarise([LoggedStep(1, 0.0, first)], FACTS, emulator=everything)
    assert counted_by_both["collectives"] == everything["collectives"]
    assert counted_by_both["overlay_collectives"] == {"all_to_all": {"count": 3, "bytes": 100}}


def test_summary_lists_what_invalidates_a_run():
    records = [
        record(1, actor__nonfinite_steps=0.0, actor__grad_norm=1.0),
        record(2, actor__nonfinite_steps=2.0, actor__grad_norm=None, actor__pg_loss=None),
        record(3, actor__nonfinite_steps=1.0, actor__grad_norm=None),
    ]
    faults = [
        {"kind": "update_skipped", "message": "1 update was skipped"},
        {"kind": "reward_error", "message": "the reward function failed", "errors": ["ValueError", "ValueError"]},
        {"kind": "reward_error", "message": "the reward function failed", "errors": ["KeyError"]},
    ]
    summary = summarise(records, FACTS, faults=faults)
    assert summary["updates_skipped"] == 3 and summary["reward_errors"] == 3
    assert summary["nonfinite_metrics"] == {"actor/grad_norm": [2, 3], "actor/pg_loss": [2]}
    clean = summarise(records[:1], FACTS)
    assert (clean["updates_skipped"], clean["nonfinite_metrics"], clean["reward_errors"]) == (0, {}, 0)
    assert clean["failure"] is None and clean["not_answering"] == []


def test_a_process_that_stopped_is_in_the_summary_once():
    def stop(rank, seconds, ended):
        facts = {"rank": rank, "phase": "update", "step": 3, "seconds": seconds, "waiting": [1], "ended": ended}
        return {"kind": "not_answering", "message": "", "time": 0.0, **facts}

    faults = [stop(2, 61.0, False), stop(0, 62.0, False), stop(0, 900.0, True), stop("trainer", 70.0, False)]
    found = summarise([record(1)], FACTS, faults=faults)["not_answering"]
    assert [(each["rank"], each["seconds"], each["ended"]) for each in found] == [
        (2, 61.0, False),
        (0, 900.0, True),
        ("trainer", 70.0, False),
    ]


def test_patches_and_emulator_meters():
    overlay = {"applied": ["a", "b", "c"], "pending": [], "effective": {"a": True, "b": False, "c": True}}
    emulator = {"peak_device_bytes": {"update": 5}, "collectives": {"all_reduce": {"count": 1, "bytes": 8}}}
    summary = summarise([record(1)], FACTS, overlay, emulator)
    assert (summary["patches_applied"], summary["patches_effective"]) == (3, 2)
    assert summary["peak_device_bytes"] == {"update": 5}
    assert summary["collectives"] == emulator["collectives"] and summary["overlay_collectives"] is None


def test_a_run_without_a_step_has_a_summary_and_no_picture(tmp_path):
    summary = summarise([], FACTS, failure="a die ran out of device memory")
    assert (summary["steps"], summary["failure"]) == (0, "a die ran out of device memory")
    assert (summary["updates_skipped"], summary["reward_last"], summary["device_memory"]) == (None, None, None)
    with pytest.raises(ReportError, match="nothing to draw"):
        draw([], "title", tmp_path / "report.png")
    assert list(tmp_path.iterdir()) == []


def test_picture_is_a_png_that_depends_on_the_data(tmp_path):
    low = [record(step, critic__score__mean=0.1, timing_s__gen=1.0, timing_s__step=2.0) for step in range(1, 4)]
    high = [record(step, critic__score__mean=0.9, timing_s__gen=2.0, timing_s__step=2.0) for step in range(1, 4)]
    for name, records in {"low": low, "same": low, "high": high, "bare": [record(1)]}.items():
        draw(records, "title", tmp_path / f"{name}.png")
    images = {path.stem: path.read_bytes() for path in tmp_path.iterdir()}
    assert all(image.startswith(PNG_SIGNATURE) for image in images.values())
    assert images["low"] == images["same"] != images["high"]


def test_the_picture_shows_rewards_and_stages_on_top_of_each_other(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: kept.append((figure, path, options)))
    steps = [
        record(step, critic__score__mean=step / 10, timing_s__gen=1.0 * step, timing_s__ref=0.5, timing_s__step=4.0)
        for step in range(1, 8)
    ]
    unknown = record(8, timing_s__gen=2.0, timing_s__step=2.0)
    draw([*steps, unknown], "A run", tmp_path / "report.png")
    ((figure, path, options),) = kept
    assert (path, options) == (tmp_path / "report.png", {"dpi": 110, "format": "png"})
    assert figure.get_suptitle() == "A run" and tuple(figure.get_size_inches()) == (9, 7.5)
    rewards, times = figure.axes
    known = [number / 10 for number in range(1, 8)]
    points, curve = rewards.lines
    assert (list(points.get_xdata()), list(points.get_ydata())) == ([*range(1, 8)], known)
    assert list(curve.get_ydata()) == moving_means(known, REWARD_WINDOW) and rewards.get_ylim() == (0, 1.02)
    assert [text.get_text() for text in rewards.get_legend().get_texts()] == ["step", f"mean of {REWARD_WINDOW} steps"]
    assert rewards.get_shared_x_axes().joined(rewards, times)
    shown = {bars.get_label(): [(bar.get_y(), bar.get_height()) for bar in bars] for bars in times.containers}
    assert list(shown) == ["rollout", "ref", "other"]
    assert shown["rollout"] == [(0, float(step)) for step in range(1, 8)] + [(0, 2.0)]
    assert shown["ref"] == [(float(step), 0.5) for step in range(1, 8)] + [(2.0, 0.0)]
    assert shown["other"] == [(step + 0.5, max(0.0, 3.5 - step)) for step in range(1, 8)] + [(2.0, 0.0)]
    middles = {bar.get_x() + bar.get_width() / 2 for bars in times.containers for bar in bars}
    assert sorted(middles) == pytest.approx([*range(1, 9)])
    assert len({bars[0].get_facecolor() for bars in times.containers}) == 3
    assert (times.get_xlabel(), times.get_ylabel(), rewards.get_ylabel()) == ("step", "seconds", "mean reward")


def test_the_picture_of_steps_without_times_has_no_bars_and_one_of_high_rewards_shows_them(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: kept.append(figure))
    draw([record(1, critic__score__mean=3.0)], "A run", tmp_path / "report.png")
    rewards, times = kept[0].axes
    assert not times.containers and times.get_legend() is None and rewards.get_ylim() == (0, pytest.approx(3.06))


def test_moving_means():
    assert moving_means([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
    assert moving_means([], 5) == []


def test_a_value_that_was_not_finite_hides_nothing(tmp_path):
    records = [record(1, critic__score__mean=0.5, training__rollout_logprob_diff_max=1e-4)]
    records.append(record(2, critic__score__mean=None, training__rollout_logprob_diff_max=None))
    summary = summarise(records, FACTS)
    assert summary["rollout_logprob_diff_max"] is None and summary["reward_last"] == 0.5
    draw(records, "title", tmp_path / "report.png")


def test_a_validation_before_training_is_no_step():
    validation = record(0, critic__score__mean=9.0, timing_s__step=9.0)
    trained = [record(step, critic__score__mean=1.0, timing_s__step=2.0) for step in (1, 2)]
    summary = summarise([validation, *trained], FACTS)
    assert summary == summarise(trained, FACTS) and (summary["steps"], summary["reward_first"]) == (2, 1.0)
    assert summarise([validation], FACTS)["steps"] == 0


def test_ray_that_ended_is_in_the_summary():
    """If workers went on after Ray's server died, the run is complete but its log is not."""
    said = "Ray's process gcs_server ended during the run, so the log lacks what workers printed since"
    faults = [{"kind": "ray_ended", "message": said, "step": 2, "time": 0.0}]
    assert summarise([record(1)], FACTS, faults=faults)["ray_ended"] == said
    assert summarise([record(1)], FACTS)["ray_ended"] is None
