"""How a run ends on the driver, with a training loop that only logs."""

import json
import pickle
from types import SimpleNamespace

import pytest

from post_training.finite_steps.weights import NonfiniteWeightsError
from post_training.report.run_error import RunError
from post_training.rewards import counts, failures
from verl_patches.features.measure.feature import MeasureSettings
from verl_patches.features.measure.run_end import faults_of_run, process_faults
from verl_patches.features.measure.run_files import RunFiles
from verl_patches.features.settings import OverlaySettings

GOOD = {"timing_s/update_actor": 1.0, "training/rollout_logprob_diff_max": 1e-4, "actor/nonfinite_steps": 0.0}


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a loop over steps, in which `work(step)` returns changes of the step's metrics."""

    def loop(work, steps=3):
        chosen = OverlaySettings(measure=MeasureSettings(output_dir=str(tmp_path)))
        files, trainer = RunFiles(str(tmp_path)), SimpleNamespace(global_steps=0)
        with faults_of_run(chosen, lambda: trainer.global_steps):
            for trainer.global_steps in range(1, steps + 1):
                process_faults().logged(trainer.global_steps, GOOD | work(trainer.global_steps), files)

    return loop


def written(folder):
    file = folder / "faults.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_good_run_ends_well_twice(run, tmp_path):
    run(lambda step: {})
    with pytest.raises(RunError):
        run(lambda step: {"actor/nonfinite_steps": 1.0})
    run(lambda step: {})


def test_skipped_update_reported_at_once_and_at_the_end(run, tmp_path, capsys):
    with pytest.raises(RunError, match="the run is not valid: 1 update was skipped at step 2") as raised:
        run(lambda step: {"actor/nonfinite_steps": float(step == 2)})
    assert raised.value.reason == "not_valid"
    assert (
        capsys.readouterr().err == "warning: 1 update was skipped at step 2, because gradients contained inf or nan\n"
    )
    (fault,) = written(tmp_path)
    assert (fault["kind"], fault["step"]) == ("update_skipped", 2)


def test_a_reward_that_failed_once_is_said_with_its_step(run, tmp_path):
    def work(step):
        if step == 3:
            failures.note("ValueError: no")
        return {}

    with pytest.raises(RunError, match=r"the reward function failed once at step 3 \(ValueError: no\)") as raised:
        run(work)
    assert raised.value.reason == "reward_error"
    assert [(fault["kind"], fault["errors"]) for fault in written(tmp_path)] == [("reward_error", ["ValueError: no"])]


def test_failures_of_an_earlier_loop_are_not_this_ones(run):
    failures.note("ValueError: old")
    run(lambda step: {})


def raising(error, at):
    def work(step):
        if step == at:
            raise error
        return {}

    return work


def test_weights_that_are_not_finite_end_it_with_their_step(run):
    from_worker = RuntimeError("a trace of many lines")
    # Ray transfers an exception pickled.
    error = NonfiniteWeightsError("the actor's weights hold inf or nan in o_proj (rank 1); mend them")
    from_worker.cause = pickle.loads(pickle.dumps(error))
    sentence = r"^step 2: the actor's weights hold inf or nan in o_proj \(rank 1\); mend them$"
    with pytest.raises(RunError, match=sentence) as raised:
        run(raising(from_worker, at=2))
    assert raised.value.reason == "not_valid"


def test_a_reward_that_fails_for_good_is_counted_in_a_step_that_is_not_logged(run, tmp_path):
    def work(step):
        failures.note("ValueError: no")
        failures.note("ValueError: no")
        raise failures.RewardError("the reward function failed twice (ValueError: no)")

    with pytest.raises(RunError, match="^step 1: the reward function failed twice") as raised:
        run(work)
    assert raised.value.reason == "reward_error"
    assert [fault["errors"] for fault in written(tmp_path)] == [["ValueError: no"] * 2]


def test_any_other_exception_is_left_alone(run):
    with pytest.raises(KeyError):
        run(raising(KeyError("theirs"), at=1))


def test_a_rule_that_raised_is_a_fault_of_a_valid_run(run, tmp_path, capsys):
    run(lambda step: {counts.RULE_ERRORS: 3 * (step == 2)})
    (fault,) = written(tmp_path)
    assert (fault["kind"], fault["step"]) == ("rule_error", 2)
    assert "a reward rule raised on 3 answers at step 2, which scored 0" in capsys.readouterr().err
