"""The features in verl's own worker: each switched off and on, and each check with the fault that it must find."""

from __future__ import annotations

import json
import math

import pytest
from omegaconf import OmegaConf

from post_training.plan.device import device_memory
from post_training.plan.job import read_job
from tests.worker_processes import jobs
from tests.worker_processes.conftest import PROMPTS, overrides
from tests.worker_processes.processes import ByRank
from verl_patches.trainer.main_ppo import compose

pytestmark = pytest.mark.slow
LAST_STAGE = 2


def step(workers, seed=0):
    """Run a whole step. Return the rollout and the metrics of a rank of the last stage."""
    rollout = workers.run(jobs.rollout, PROMPTS)[0]
    workers.run(jobs.old_log_prob)
    workers.run(jobs.reference_log_prob)
    return rollout, workers.run(jobs.update, seed)[LAST_STAGE]


def losses(metrics):
    return metrics["actor/pg_loss"], metrics["actor/kl_loss"], metrics["actor/grad_norm"]


def test_every_patch_is_in_use(workers):
    assert not workers.report["problems"]
    for target in ("verl.workers.megatron_workers:ActorRolloutRefWorker.update_actor", "vllm.config:"):
        assert any(name.startswith(target) for name in workers.report["applied"])


def test_training_and_rollout_are_built_with_the_weights_of_the_folder(workers):
    """The model path has no weights, and nothing has been resharded yet."""
    assert workers.run(jobs.differing_at_first) == [[]] * 4


def test_rollout_and_training_agree_after_every_update(workers):
    workers.run(jobs.switch, measure={"verify_weights": True})
    seen = set()
    for number in range(3):
        rollout, metrics = step(workers, seed=number)
        assert metrics["reshard/weights_differing"] == metrics["reshard/values_changed_by_casts"] == 0
        assert metrics["rollout/expert_sets_differ"] == 0 and metrics["rollout/expert_sets_compared"] > 100
        assert metrics["rollout/expert_ties_differ"] < 0.01
        assert 0 < metrics["training/rollout_logprob_diff_max"] < 1e-3
        assert 0 < metrics["training/rollout_logprob_diff_mean"] <= metrics["training/rollout_logprob_diff_max"]
        assert metrics["actor/grad_norm"][0] > 0
        seen.add(str(rollout["responses"]))
    assert len(seen) == 3


def test_stale_absorbed_weights_are_found_by_the_difference(workers):
    workers.run(jobs.switch, residency={"enabled": False})
    step(workers)
    workers.run(jobs.leave_out_absorbed_refresh)
    try:
        _, metrics = step(workers)
    finally:
        workers.run(jobs.put_back_absorbed_refresh)
    assert metrics["training/rollout_logprob_diff_max"] > 1e-3


def test_rounded_router_biases_send_tokens_to_other_experts(workers):
    workers.run(jobs.switch, measure={"verify_weights": True})
    workers.run(jobs.round_router_biases)
    try:
        _, metrics = step(workers)
    finally:
        workers.run(jobs.put_back_absorbed_refresh)
    assert metrics["rollout/expert_sets_differ"] > 0.2
    assert metrics["reshard/weights_differing"] == 2


def test_a_single_wrong_weight_is_found_by_the_comparison(workers):
    workers.run(jobs.switch, measure={"verify_weights": True})
    workers.run(jobs.rollout, PROMPTS)
    assert workers.run(jobs.differing_weights, disturb=False) == [[]] * 4
    found = workers.run(jobs.differing_weights, disturb=True)
    assert found[0] == found[3] and len(found[0]) == 1


def test_log_probs_follow_the_temperature(workers):
    workers.run(jobs.rollout, PROMPTS)
    at_temperature = workers.run(jobs.old_log_prob)[0]
    workers.run(jobs.switch, temperature={"enabled": False})
    plain = workers.run(jobs.old_log_prob)[0]
    assert at_temperature != plain
    workers.run(jobs.reference_log_prob)
    metrics = workers.run(jobs.update)[LAST_STAGE]
    assert metrics["training/rollout_logprob_diff_max"] > 0.01


def test_handles_of_samples_change_neither_tokens_nor_losses_nor_weights(workers):
    rollout, metrics = step(workers)
    expected, weights = losses(metrics), workers.run(jobs.digest)
    workers.run(jobs.recall)
    workers.run(jobs.switch, sample_handles={"enabled": True})
    of_ranks = workers.run(jobs.step_with_handles, PROMPTS)
    assert of_ranks[0][0] == rollout
    found = of_ranks[LAST_STAGE][1]
    assert losses(found) == expected and found["samples/collectives"] == 1
    assert workers.run(jobs.digest) == weights


@pytest.mark.parametrize("feature", ["residency", "dp_sync", "reshard"])
def test_a_feature_changes_neither_tokens_nor_losses(workers, feature):
    rollout, metrics = step(workers)
    workers.run(jobs.recall)
    workers.run(jobs.switch, **{feature: {"enabled": False}})
    plain_rollout, plain = step(workers)
    assert plain_rollout == rollout
    assert losses(plain) == losses(metrics)


def test_gradients_are_the_same_bits_without_old_log_prob(workers):
    workers.run(jobs.rollout, PROMPTS)
    workers.run(jobs.reference_log_prob)
    workers.run(jobs.old_log_prob)
    metrics = workers.run(jobs.update)[LAST_STAGE]
    gradients, weights = workers.run(jobs.gradient_digest), workers.run(jobs.digest)
    workers.run(jobs.recall)
    workers.run(jobs.switch, recompute_old_log_prob=False)
    workers.run(jobs.no_old_log_prob)
    skipped = workers.run(jobs.update)[LAST_STAGE]
    assert workers.run(jobs.gradient_digest) == gradients
    assert workers.run(jobs.digest) == weights
    assert losses(skipped) == losses(metrics)
    assert not any("old_log_prob" in name for name in skipped)


def test_policy_stays_the_reference_where_the_rate_is_0(workers):
    """They are bit-identical even after a step with gradients, until the step that ends the warm-up."""
    workers.run(jobs.schedule, lr_warmup_steps=1)
    found = []
    try:
        for number in (1, 2, 3):
            workers.run(jobs.rollout, PROMPTS)
            workers.run(jobs.old_log_prob)
            workers.run(jobs.reference_log_prob)
            found.append(workers.run(jobs.update, training_step=number)[LAST_STAGE])
    finally:
        workers.run(jobs.schedule, lr_warmup_steps=-1)
    assert [metrics["actor/grad_norm"][0] > 0 for metrics in found] == [True] * 3
    assert [any(metrics["actor/kl_loss"]) for metrics in found] == [False, False, True], found


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_with_gradients_that_are_not_finite_changes_no_bit(workers, bad):
    step(workers)
    before = workers.run(jobs.digest)
    metrics = workers.run(jobs.update, 0, bad_advantage=bad)
    assert [each["actor/nonfinite_steps"] for each in metrics] == [1] * 4
    assert workers.run(jobs.digest) == before
    assert workers.run(jobs.update)[LAST_STAGE]["actor/nonfinite_steps"] == 0
    assert workers.run(jobs.digest) != before


def test_one_element_on_one_rank_that_is_not_finite_is_seen_by_all(workers):
    for bad in (math.nan, math.inf, -math.inf):
        assert workers.run(jobs.finds_nonfinite, ByRank([1.0, 1.0, 1.0, bad])) == [True] * 4
    assert workers.run(jobs.finds_nonfinite, 1.0) == [False] * 4
    step(workers)
    before = workers.run(jobs.digest)
    metrics = workers.run(jobs.update, bad_gradient=ByRank([False, False, False, True]))
    assert [each["actor/nonfinite_steps"] for each in metrics] == [1] * 4
    assert workers.run(jobs.digest) == before


def test_without_the_guard_the_same_step_ruins_the_weights(workers):
    step(workers)
    workers.run(jobs.switch, nonfinite={"enabled": False})
    workers.run(jobs.update, 0, bad_advantage=math.nan)
    assert any(workers.run(jobs.weights_hold_nan))


def test_memory_by_phase(workers):
    _, metrics = step(workers)
    for phase in ("rollout", "reshard", "ref", "old_log_prob", "update", "idle"):
        assert metrics[f"memory/peak_bytes/{phase}"] >= metrics[f"memory/allocated_bytes/{phase}"] > 0
    kv_cache, state = max(workers.run(jobs.kv_cache_bytes)), max(workers.run(jobs.training_state_bytes))
    assert kv_cache > 1 << 20 and state > 1 << 20
    assert metrics["memory/allocated_bytes/idle"] + kv_cache <= metrics["memory/allocated_bytes/rollout"]
    workers.run(jobs.switch, residency={"enabled": False})
    _, plain = step(workers)
    assert plain["memory/peak_bytes/update"] >= metrics["memory/allocated_bytes/update"] + kv_cache
    assert plain["memory/allocated_bytes/rollout"] >= metrics["memory/allocated_bytes/rollout"] + state


def test_host_memory_is_what_the_plan_says(workers, checkpoint, description):
    step(workers)
    workers.run(jobs.phase, "reshard")  # now everything, including the new optimizer state, has been offloaded once
    config = OmegaConf.to_container(compose("rehearsal", overrides(checkpoint, description)), resolve=True)
    job = read_job(config, json.loads((description / "config.json").read_text()))
    planned = device_memory(job, die_bytes=1 << 32, staging=0)
    found = workers.run(jobs.host_bytes)
    assert [die["rollout_weights"] for die in found] == pytest.approx([planned.rotary_tables] * 4, rel=1e-3)
    largest = max(sum(die.values()) for die in found)
    assert largest == pytest.approx(planned.host, rel=1e-3)


def test_only_what_a_step_has_written_is_copied_to_the_host(workers):
    step(workers)
    phases = ["reshard", "rollout", "idle", "old_log_prob", "ref", "update"]
    for copied in workers.run(jobs.bytes_copied_out, phases):
        assert copied["reshard"] > 1 << 20 and copied["rollout"] > 1 << 20, "optimizer, then training weights"
        assert copied["ref"] == copied["update"] == 0, "training weights again, then the reference policy's"


@pytest.mark.parametrize("move", [False, True])
def test_rollout_weights_keep_their_addresses_while_they_are_served(workers, move):
    workers.run(jobs.watch_rollout_addresses)
    for moved in (False, move):
        workers.run(jobs.phase, "update")
        workers.run(jobs.generate_in_phases, moved)
    for found in workers.run(jobs.rollout_addresses_moved):
        assert found["watched"] > 20 and found["within"] == move


@pytest.mark.parametrize("cycles", [10, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_cycles_move_no_rollout_weight_and_leak_nothing(workers, cycles):
    workers.run(jobs.switch, measure={"verify_weights": True})
    served = workers.run(jobs.served_bytes)
    for bytes_of_die, found in zip(served, workers.run(jobs.cycle_weights, cycles), strict=True):
        assert found["watched"] > 20 and found["moved"] == found["differing"] == found["leaked"] == 0
        assert found["unmapped_in_update"] >= bytes_of_die > found["unmapped_in_rollout"] == 0


@pytest.mark.parametrize("cached", [False, True])
def test_a_graph_keeps_the_addresses_of_weights_only_if_they_never_change(workers, cached):
    assert workers.run(jobs.graph_freezes_weights, cached) == [True] * 4
    workers.run(jobs.switch, residency={"rollout_addresses": "released"})
    assert workers.run(jobs.graph_freezes_weights, cached) == [False] * 4
    workers.run(jobs.switch, residency={"enabled": False})
    assert workers.run(jobs.graph_freezes_weights, cached) == [True] * 4


def generated(workers, **dp_sync):
    """Generate from the initial weights with these dp_sync settings. Return responses and decode metrics."""
    workers.run(jobs.recall)
    workers.run(jobs.switch, dp_sync=dp_sync)
    found = workers.run(jobs.rollout_collectives, PROMPTS)
    assert all(each["agreements"] == found[0]["agreements"] for each in found)
    return found[0]


def test_ranks_agree_once_a_window_and_the_tokens_are_those_of_upstream(workers):
    off = generated(workers, enabled=False)
    every, windowed = generated(workers, lease_steps=1), generated(workers, lease_steps=3)
    assert off["responses"] == every["responses"] == windowed["responses"]
    assert off["agreements"] == every["host"] == windowed["host"] == 0
    forwards = every["rollout/decode_steps"] + every["rollout/prefill_steps"]
    assert off["host"] == 2 * forwards + 1 and every["agreements"] == forwards + 1
    steps, prompts = windowed["rollout/decode_steps"], windowed["rollout/prefill_steps"]
    assert steps >= every["rollout/decode_steps"] > 3
    assert windowed["agreements"] <= prompts + steps / 3 + 2 < forwards
    assert windowed["rollout/wasted_steps"] < 3


def test_slot_steps_and_their_bound_are_those_of_the_responses(workers):
    """Engine 0 ends its 32 responses after three tokens, engine 1 after eight; the prompt's forward gives the first."""
    found = {}
    for steps in (3, 1):
        workers.run(jobs.recall)
        workers.run(jobs.switch, dp_sync={"lease_steps": steps})
        counted = workers.run(jobs.rollout_collectives, PROMPTS, ByRank([3, 3, None, None]))
        found[steps] = {(each["rollout/slot_steps"], each["rollout/slot_steps_bound"]) for each in counted}
    lengths = [sum(mask[-8:]) for mask in workers.run(jobs.tokens)[0]["attention_mask"]]
    halves = [[min(3, length) for length in lengths[:32]], lengths[32:]]
    running = [[sum(length > step for length in half) for half in halves] for step in range(1, max(halves[1]))]
    slots, bound = sum(2 * max(both) for both in running), sum(2 * ((sum(both) + 1) // 2) for both in running)
    assert found[1] == {(slots, bound)} and slots > bound + 100
    ((in_windows, the_same),) = found[3]
    assert in_windows >= slots and the_same == bound


def test_requests_that_wait_are_admitted_between_windows_and_none_is_lost(workers):
    plain = workers.run(jobs.generate_in_window, PROMPTS)[0]
    workers.run(jobs.recall)
    waiting = workers.run(jobs.generate_in_window, PROMPTS, running=ByRank([12, 12, 20, 20]))
    assert waiting[0]["responses"] == plain["responses"]
    assert waiting[0]["prefill_steps"] > plain["prefill_steps"]
    metrics = ("agreements", "decode_steps", "prefill_steps")
    assert all(each[name] == waiting[0][name] for each in waiting for name in metrics)
    assert waiting[0]["agreements"] <= waiting[0]["prefill_steps"] + waiting[0]["decode_steps"] / 16 + 2


@pytest.mark.parametrize("fault", ["a prompt within a window", "a request loses its blocks"])
def test_an_engine_that_breaks_its_window_is_named_on_all_ranks(workers, fault):
    found = workers.run(jobs.generate_in_window, PROMPTS, running=ByRank([32, 32, 12, 12]), fault=fault)
    assert len(found) == 4 and all("rollout rank 1 could not keep its sync window" in each["error"] for each in found)


@pytest.mark.parametrize("graphs", [False, True])
def test_agreements_have_the_outcome_of_upstreams(workers, graphs):
    on = workers.run(jobs.forward_agreements, 30, graphs)
    workers.run(jobs.switch, dp_sync={"enabled": False})
    assert workers.run(jobs.forward_agreements, 30, graphs) == on
    assert {with_prefill for *_, with_prefill, _ in on[0]} == {True, False}
    alike = [one == other for one, other in zip(on[0], on[2], strict=True)]
    assert not all(alike)
    if graphs:
        # Without a prompt, every engine runs as many tokens as the engine with the most.
        assert all(same for same, (*_, prefill, _) in zip(alike, on[0], strict=True) if not prefill)


def test_an_engine_that_has_finished_goes_on_with_the_others(workers):
    """Engine 0 ends its responses after two tokens, but the others' experts still need its dies."""
    early = ByRank([2, 2, None, None])
    found = workers.run(jobs.rollout, PROMPTS, early)[0]
    padding = {token for response in found["responses"][:32] for token in response[2:]}
    assert len(padding) == 1 and any(token not in padding for r in found["responses"][32:] for token in r[2:])
    workers.run(jobs.recall)
    workers.run(jobs.switch, dp_sync={"enabled": False})
    plain = workers.run(jobs.rollout, PROMPTS, early)[0]
    assert plain["responses"] == found["responses"]
    # The dummy forwards of an engine depend on what its buffers held, and share products with the others' tokens.
    for one, other in zip(plain["rollout_log_probs"], found["rollout_log_probs"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    workers.run(jobs.switch, dp_sync={"enabled": True})
    counted = workers.run(jobs.rollout_collectives, PROMPTS, early)
    assert len({count["agreements"] for count in counted}) == 1 and counted[0]["agreements"] > 2


def test_decoding_through_mc2_as_on_an_a3_agrees_with_training(workers):
    """MC2 needs 16 ranks, which the engine is told that it has. On an A3 it masks padding tokens."""
    assert workers.run(jobs.soc_version) == ["A3"] * 4
    workers.run(jobs.decode_through_mc2)
    try:
        _, metrics = step(workers)
    finally:
        counted = workers.run(jobs.end_mc2)
    assert 0 < metrics["training/rollout_logprob_diff_max"] < 1e-3
    assert all(dispatched == masked > 0 for dispatched, masked in counted)


def test_resharding_sends_an_expert_only_to_the_rank_that_serves_it(workers):
    _, metrics = step(workers)
    served = max(workers.run(jobs.served_expert_bytes))
    assert 0 < metrics["reshard/expert_bytes_received"] <= served
    assert metrics["collectives/all_to_all/count"] >= 1


def test_a_second_activation_changes_nothing(workers):
    assert workers.run(jobs.activate_again) == [True] * 4


def test_checkpoint_calls_find_weights_and_optimizer_state_on_the_device(workers):
    step(workers)
    workers.run(jobs.phase, "idle")
    assert all(workers.run(jobs.checkpoint_finds_state))


def test_engines_draw_different_samples_and_another_step_draws_new_ones(workers):
    same = [PROMPTS[0]] * 8
    first = workers.run(jobs.rollout, same)[0]["responses"]
    second = workers.run(jobs.rollout, same)[0]["responses"]
    assert first != second
    assert first[:32] != first[32:]
