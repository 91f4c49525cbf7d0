"""Faults that make a run invalid, and the sentences that report them."""

import json
import math

import numpy as np
import pytest

from post_training.report.faults import RunFaults, steps_in_words

GOOD = {
    "timing_s/update_actor": 1.0,
    "training/rollout_logprob_diff_max": 2e-4,
    "reshard/weights_exact": 1.0,
    "actor/nonfinite_steps": 0.0,
    "actor/grad_norm": np.float64(0.5),
    "text": "[1 2]",
}
DIFFERENCE = "training/rollout_logprob_diff_max"
EXPERTS, TIES, MEAN = "rollout/expert_sets_differ", "rollout/expert_ties_differ", "training/rollout_logprob_diff_mean"


def faults_of(*steps, precision="bfloat16", rewards=()):
    faults = RunFaults(precision)
    for number, changes in enumerate(steps, start=1):
        faults.add(number, {k: v for k, v in (GOOD | changes).items() if v is not ...}, rewards if number == 1 else ())
    return faults


def test_a_good_run_has_none():
    faults = faults_of({}, {}, precision="float32")
    assert faults.clauses() == {} and faults.sentence() is None
    assert not RunFaults("bfloat16").add(0, {"val-core/acc": 0.5}), "a validation has no update to compare"


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        (
            {"actor/nonfinite_steps": 1.0},
            "update_skipped",
            "1 update was skipped at step 2, because gradients contained",
        ),
        ({"actor/nonfinite_steps": 2.0}, "update_skipped", "2 updates were skipped at step 2"),
        ({"critic/nonfinite_steps": 1.0}, "update_skipped", "1 update was skipped at step 2"),
        ({"reshard/weights_exact": 0.0}, "weights_differ", "rollout weights differed from training weights at step 2"),
        ({"reshard/weights_exact": 0.5}, "weights_differ", "differed from training weights at step 2"),
        ({DIFFERENCE: ...}, "not_compared", "no log-prob of rollout and training was compared at step 2"),
        ({DIFFERENCE: 1e-3}, "log_probs_differ", "differed by up to 1.00e-03 at step 2; in float32"),
        (
            {EXPERTS: 0.41},
            "experts_differ",
            "chose different experts for up to 41.00% of the compared tokens and layers",
        ),
        ({EXPERTS: 1e-4, TIES: 1e-3}, "experts_differ", "for up to 0.01% of the compared"),
        ({DIFFERENCE: math.nan}, "metric_not_finite", f"metrics were not finite: {DIFFERENCE} at step 2"),
        ({DIFFERENCE: None}, "metric_not_finite", f"metrics were not finite: {DIFFERENCE} at step 2"),
        ({"actor/grad_norm": np.float32("inf")}, "metric_not_finite", "metrics were not finite: actor/grad_norm"),
    ],
)
def test_each_fault_is_named_with_its_step(changes, kind, says):
    faults = faults_of({}, changes, {}, precision="float32")
    assert list(faults.clauses()) == [kind] and says in faults.sentence()
    assert faults.sentence().startswith("the run is not valid: ") and "\n" not in faults.sentence()


def test_ties_let_single_tokens_differ_and_not_the_mean():
    tied = {TIES: 1e-3, DIFFERENCE: 3e-2, MEAN: 2e-5}
    assert not faults_of(tied, precision="float32").clauses()
    assert "log_probs_differ" in faults_of(tied | {MEAN: 2e-4}, precision="float32").clauses()
    assert "log_probs_differ" in faults_of(tied | {TIES: 0.0}, precision="float32").clauses()


def test_ties_between_experts_are_no_fault():
    assert not faults_of({EXPERTS: 0.0, TIES: 2e-3}, precision="float32").clauses()
    assert not faults_of({EXPERTS: 0.41}, precision="bfloat16").clauses()


def test_in_bfloat16_a_large_difference_is_no_fault():
    assert faults_of({DIFFERENCE: 1.5}).sentence() is None


def test_one_failure_of_a_reward_in_a_whole_run_is_a_fault():
    faults = faults_of({}, {}, rewards=["ValueError: no answer"])
    assert faults.sentence() == (
        "the run is not valid: the reward function failed once at step 1 (ValueError: no answer)"
    )
    assert faults.reward_error_count == 1


def test_a_step_tells_its_own_faults_only():
    faults = RunFaults("bfloat16")
    assert list(faults.add(1, GOOD | {"actor/nonfinite_steps": 1.0})) == ["update_skipped"]
    assert faults.add(2, GOOD) == {}
    assert list(faults.clauses()) == ["update_skipped"]


def test_the_likeliest_cause_comes_first_and_many_metrics_are_cut_short():
    nonfinite = {f"actor/{letter}": math.nan for letter in "abcde"}
    sentence = faults_of({"actor/nonfinite_steps": 1.0} | nonfinite).sentence()
    assert sentence.index("was skipped") < sentence.index("not finite")
    assert sentence.endswith("actor/a at step 1, actor/b at step 1, actor/c at step 1 and 2 more metrics")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([3], "step 3"),
        ([1, 2], "steps 1 and 2"),
        ([1, 2, 3, 4, 5], "steps 1, 2, 3, 4 and 5"),
        (list(range(1, 25)), "steps 1, 2, 3, 4 and 20 more"),
    ],
)
def test_steps_in_words(steps, words):
    assert steps_in_words(steps) == words


def test_the_gate_is_the_limit_itself_and_the_largest_difference_is_told():
    below, steps = math.nextafter(1e-3, 0), [{DIFFERENCE: 2e-3}, {DIFFERENCE: 5e-3}, {DIFFERENCE: 1e-3}]
    assert faults_of({DIFFERENCE: below}, precision="float32").sentence() is None
    assert faults_of(*steps, precision="float32").sentence() == (
        "the run is not valid: log-probs of rollout and training differed by up to 5.00e-03 at steps 1, 2 and 3; "
        "in float32 the limit is 0.001"
    )


def test_all_kinds_together_are_one_sentence_in_the_order_of_likely_causes():
    changes = {"actor/nonfinite_steps": 1.0, "critic/nonfinite_steps": 2.0, "reshard/weights_exact": 0.0}
    faults = faults_of(changes | {DIFFERENCE: ..., "a": None, "b": math.inf, "c": None}, {}, rewards=["E: 1", "E: 2"])
    assert faults.sentence() == (
        "the run is not valid: the reward function failed 2 times at step 1 (E: 1); "
        "3 updates were skipped at step 1, because gradients contained inf or nan; "
        "rollout weights differed from training weights at step 1; "
        "no log-prob of rollout and training was compared at step 1; "
        "metrics were not finite: a at step 1, b at step 1, c at step 1"
    )


def test_faults_of_a_run_that_goes_on_are_those_of_before():
    faults = faults_of(
        {"actor/nonfinite_steps": 1.0, DIFFERENCE: 2e-3, "a": None}, {}, precision="float32", rewards=["E"]
    )
    resumed = RunFaults("float32")
    resumed.restore(faults.state())
    assert resumed == faults and resumed.sentence() == faults.sentence() and "precision" not in faults.state()
    resumed.add(3, GOOD | {"actor/nonfinite_steps": 1.0, "a": math.nan}, ["F"])
    assert resumed.skipped == {1: 1, 3: 1} and resumed.nonfinite == {"a": [1, 3]} and resumed.reward_error_count == 2


def test_faults_before_and_behind_a_resume_are_one_runs():
    """Restore faults of every kind from JSON."""
    steps = [
        {"actor/nonfinite_steps": 1.0},
        {DIFFERENCE: 0.5},
        {DIFFERENCE: ...},
        {EXPERTS: 0.25},
        {"reshard/weights_exact": 0.0, "actor/grad_norm": math.nan},
    ]
    whole = faults_of(*steps, precision="float32", rewards=["KeyError"])
    resumed = RunFaults("float32")
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert resumed == whole and len(whole.clauses()) == 7
    for faults in (whole, resumed):
        faults.add(6, GOOD | {"actor/nonfinite_steps": 2.0, EXPERTS: 0.5}, ["ValueError"])
        faults.add(1, GOOD, ["again"])
    assert resumed == whole and resumed.sentence() == whole.sentence()
    assert resumed.skipped == {1: 1, 6: 2} and resumed.reward_errors == {1: ["KeyError", "again"], 6: ["ValueError"]}
