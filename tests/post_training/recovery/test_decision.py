"""Deciding whether to restart a run, and with which settings."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from post_training.recovery.causes import Failure
from post_training.recovery.decision import Again, Attempt, Enough, Supervision
from post_training.recovery.policy import NEVER_RETRIED, Policy
from post_training.recovery.reduction import reduced
from post_training.recovery.signs import CAUSES

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def config(micro=8, log_prob=4, sequences=64, share=0.6, exact=True, dynamic=False, tokens=64):
    return {
        "data": {"max_prompt_length": 8, "max_response_length": 24},
        "actor_rollout_ref": {
            "actor": {
                "ppo_micro_batch_size_per_gpu": micro,
                "use_dynamic_bsz": dynamic,
                "ppo_max_token_len_per_gpu": tokens,
            },
            "rollout": {
                "log_prob_micro_batch_size_per_gpu": log_prob,
                "max_num_seqs": 1024,  # not read by verl
                "engine_kwargs": {"vllm": {} if sequences is None else {"max_num_seqs": sequences}},
                "gpu_memory_utilization": share,
            },
            "ref": {"log_prob_micro_batch_size_per_gpu": None},
            "overlay": {"exact_loss": {"enabled": exact}},
        },
    }


def attempt(cause, step=3, checkpoint=2, stage="update", **sizes):
    return Attempt(Failure(cause, "a sentence", stage), step, checkpoint, config(**sizes))


@pytest.mark.parametrize("cause", NEVER_RETRIED)
def test_recurring_failure_is_not_retried(cause):
    assert Supervision(Policy()).decide(attempt(cause)) == Enough(f"{cause} is not retried")


def test_nothing_is_tried_again_where_retries_are_off():
    assert Supervision(Policy(enable_retry=False)).decide(attempt("worker_died")) == Enough("enable_retry is false")


def test_the_same_failure_after_the_same_step_ends_it():
    supervision = Supervision(Policy())
    assert supervision.decide(attempt("worker_died")) == Again(120.0, {})
    assert supervision.decide(attempt("hang")) == Again(120.0, {}), "another failure is another matter"
    assert supervision.decide(attempt("hang", step=4)) == Again(120.0, {}), "so is another step"
    assert supervision.decide(attempt("hang", step=4)) == Enough("hang twice after step 4")


def test_the_budget_counts_from_the_newest_checkpoint():
    supervision = Supervision(Policy(max_retry_times=2))
    for step in (3, 4):
        assert isinstance(supervision.decide(attempt("worker_died", step)), Again)
    assert isinstance(supervision.decide(attempt("worker_died", 5, checkpoint=4)), Again)
    assert isinstance(supervision.decide(attempt("worker_died", 6, checkpoint=4)), Again)
    assert "max_retry_times is 2" in supervision.decide(attempt("worker_died", 7, checkpoint=4)).reason


def test_waits_double_while_the_network_is_away():
    supervision = Supervision(Policy(max_retry_times=9))
    waits = [supervision.decide(attempt("network_error", step=0, checkpoint=0)).wait_s for _ in range(7)]
    assert waits == [120, 240, 480, 960, 1920, 3600, 3600]
    assert supervision.decide(attempt("worker_died")).wait_s == 120
    assert supervision.decide(attempt("network_error")).wait_s == 120


def test_waits_begin_anew_after_another_failure():
    supervision = Supervision(Policy(max_retry_times=9))
    met = ["network_error", "network_error", "worker_died", "network_error", "network_error"]
    waits = [supervision.decide(attempt(cause, step=0, checkpoint=0)).wait_s for cause in met]
    assert waits == [120, 240, 120, 120, 240]


def test_waits_begin_anew_after_a_checkpoint():
    supervision = Supervision(Policy(max_retry_times=9))
    met = [(0, 0), (0, 0), (0, 0), (12, 10), (12, 10), (25, 20), (25, 20)]
    waits = [supervision.decide(attempt("network_error", step, checkpoint)).wait_s for step, checkpoint in met]
    assert waits == [120, 240, 480, 120, 240, 120, 240]


def test_memory_is_made_by_smaller_micro_batches_until_there_is_none_left():
    supervision, micro, found = Supervision(Policy(max_retry_times=9)), 8, []
    for _ in range(3):
        decided = supervision.decide(attempt("OOM", micro=micro))
        micro = decided.overrides[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]
        found.append(micro)
    assert found == [4, 2, 1]
    assert "already at their minimum" in supervision.decide(attempt("OOM", micro=1)).reason


def test_reductions_of_different_stages_add_up():
    supervision = Supervision(Policy())
    supervision.decide(attempt("OOM"))
    both = supervision.decide(attempt("OOM", stage="rollout", micro=4)).overrides
    assert both == {
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
        f"++{ROLLOUT}.engine_kwargs.vllm.max_num_seqs": 32,
        f"{ROLLOUT}.gpu_memory_utilization": 0.3,
    }


def test_gradients_are_not_changed_behind_the_users_back():
    refused = Supervision(Policy()).decide(attempt("OOM", exact=False))
    assert "would change the gradients while actor_rollout_ref.overlay.exact_loss.enabled is false" in refused.reason
    log_prob = Supervision(Policy()).decide(attempt("OOM", exact=False, stage="log_prob"))
    assert log_prob.overrides == {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 2}
    smallest = Supervision(Policy()).decide(attempt("OOM", exact=False, stage="log_prob", log_prob=1))
    assert "already at their minimum" in smallest.reason
    nothing = Supervision(Policy()).decide(Attempt(Failure("OOM", "a sentence"), 0, 0))
    assert "ended before it wrote" in nothing.reason


def test_sequences_in_flight_are_those_that_the_engine_is_given():
    """The composed configuration has the halved limit where verl reads it, even if the job does not set one."""
    from verl_patches.trainer.main_ppo import compose

    for name, before, half in (("rehearsal", None, 128), ("deepseek_v3_256die_true_weight", 64, 32)):
        given = [f"{key}={value}" for key, value in reduced(config(sequences=before), "rollout").items()]
        engine = compose(name, given).actor_rollout_ref.rollout.engine_kwargs.vllm
        assert engine.max_num_seqs == half


def test_a_critic_takes_less_with_the_actor():
    with_critic = config() | {"critic": {"ppo_micro_batch_size_per_gpu": 6}}
    key = "critic.ppo_micro_batch_size_per_gpu"
    assert key not in reduced(with_critic, "update")
    found = reduced(with_critic | {"algorithm": {"adv_estimator": "gae"}}, "update")
    assert found == {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4, key: 3}


@given(st.integers(1, 512), st.integers(1, 8))
def test_a_smaller_micro_batch_divides_what_the_larger_one_did(micro, times):
    new = reduced(config(micro=micro), "update").get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if micro == 1:
        assert new is None
    else:
        assert 1 <= new <= micro / 2 and (micro * times) % new == 0


@given(st.integers(1, 4096))
@example(32)
@example(33)
def test_tokens_of_a_micro_batch_hold_the_longest_sequence(tokens):
    new = reduced(config(dynamic=True, tokens=tokens), "update")
    assert new == ({f"{ACTOR}.ppo_max_token_len_per_gpu": max(32, tokens // 2)} if tokens > 32 else {})


@given(st.lists(st.tuples(st.sampled_from(CAUSES), st.integers(0, 5), st.integers(0, 3)), min_size=40, max_size=40))
def test_every_supervision_comes_to_its_end(met):
    """Without a new checkpoint, at most max_retry_times restarts follow the first start, whatever happens."""
    supervision, starts = Supervision(Policy(max_retry_times=5)), 0
    for cause, step, _ in met:
        if isinstance(supervision.decide(attempt(cause, step, checkpoint=0, micro=2**40)), Enough):
            break
        starts += 1
    assert starts <= 5
