"""Rejects runs whose old log-probs are not those of the update's own forward, before Ray starts and in the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from post_training.one_update import reason_old_log_prob_is_needed
from post_training.report.run_folder import at
from verl_plugin.sentences import invalid
from verl_plugin.trainer_modes import MODE_KEY, MODULES_KEY, ONE_FORWARD, REGISTRATION

ENGINES = "verl_plugin.onpolicy.engines"
_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"
_BEFORE = "it needs old log-probs before the update"
_OPEN = ("trainer.critic_warmup", "a step without an update has no forward that yields log-probs", (0, None), "0")
# Keys; why a value cannot be combined with the update's own log-probs; the accepted values; and the remedy.
_READERS = (
    ("trainer.use_v1", "the trainer must be one of verl's trainer/ppo/v1", (True,), "true"),
    (f"{_CORRECTION}.bypass_mode", "old log-probs are then the rollout's", (False, None), "false"),
    (f"{_CORRECTION}.rollout_is", _BEFORE, (None,), "null"),
    (f"{_CORRECTION}.rollout_rs", _BEFORE, (None,), "null"),
    (f"{_ACTOR}.calculate_sum_pi_squared", "the skipped forward computes it", (False, None), "false"),
    (f"{_MODEL}.use_fused_kernels", "fused kernels keep no logits for the entropy", (False, None), "false"),
    ("distillation.enabled", "the teacher's loss has not been compared with it", (False, None), "false"),
    (
        f"{_ACTOR}.megatron.dynamic_context_parallel",
        "micro batches of the two forwards differ",
        (False, None),
        "false",
    ),
    _OPEN,
)
_READING_ESTIMATORS = ("optimal_token_baseline", "tir_optimal_token_baseline")
# Groups that are passed on to the model, in which dropout can be set. verl takes the second in place of the first, if
# there is one: docs/upstream/verl-model-overrides.md.
_MODEL_GROUPS = (
    f"{_MODEL}.override_config",
    f"{_MODEL}.override_config.model_config",
    f"{_MODEL}.lora",
    f"{_ACTOR}.megatron.override_transformer_config",
)


def onpolicy_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a run with the trainer `sync_onpolicy` would not be exact, whatever the model is.

    Args:
        config: resolved configuration of the whole job.
    """
    if at(config, MODE_KEY) != ONE_FORWARD:
        return
    reason = reason_old_log_prob_is_needed(config, config["data"]["train_batch_size"])
    if reason:
        yield invalid(MODE_KEY, ONE_FORWARD, f"it is exact with one update of a batch, but {reason}", "sync otherwise")
    for key, why, accepted, remedy in _READERS:
        if at(config, key) not in accepted:
            yield _combined(key, at(config, key), why, remedy)
    estimator, loss = at(config, "algorithm.adv_estimator"), at(config, f"{_ACTOR}.policy_loss.loss_mode")
    if estimator in _READING_ESTIMATORS:
        yield _combined("algorithm.adv_estimator", estimator, _BEFORE, "grpo")
    if loss == "bypass_mode":
        yield _combined(f"{_ACTOR}.policy_loss.loss_mode", loss, "old log-probs are then the rollout's", "vanilla")
    if at(config, f"{_ACTOR}.strategy") == "megatron" and at(config, f"{_ACTOR}.megatron.router_replay.mode") == "R2":
        why = "experts are recorded in the skipped forward"
        yield _combined(f"{_ACTOR}.megatron.router_replay.mode", "R2", why, "R3 or disabled")
    for group in _MODEL_GROUPS:
        yield from dropout_problems(at(config, group) or {}, f"{group}.")


def registration_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error if the trainer would not be registered in verl's processes."""
    modules = at(config, MODULES_KEY)
    if at(config, MODE_KEY) == ONE_FORWARD and REGISTRATION not in str(modules or "").split(","):
        yield invalid(
            MODULES_KEY, modules, f"verl finds {MODE_KEY}={ONE_FORWARD} only through that module", REGISTRATION
        )


def dropout_problems(model: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield an error for each value of a model's configuration that makes the training forward random.

    Args:
        model: config.json, or a group of overrides of it.
        prefix: put before the names of the keys.
    """
    for name, value in model.items():
        random = "dropout" in name or name.endswith("_pdrop") or name == "moe_input_jitter_eps"
        if random and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield _combined(f"{prefix}{name}", value, "two forwards of the same weights then differ", "0")


def onpolicy_model_problems(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the trainer `sync_onpolicy` does not work with `model`, the values of its config.json."""
    if at(config, MODE_KEY) == ONE_FORWARD:
        yield from dropout_problems(model, "config.json: ")


def _combined(key: str, value: Any, reason: str, remedy: str) -> str:
    return invalid(key, value, f"with {MODE_KEY}={ONE_FORWARD}: {reason}", f"{remedy}, or {MODE_KEY} to sync")
