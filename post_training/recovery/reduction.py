"""Make a job use less device memory for the same computation: smaller micro batches, fewer sequences in flight.

The batches of a step stay as they are. With the exact loss (``overlay.exact_loss``) the gradients of an update do not
depend on how its mini batch is cut, so a smaller micro batch changes them by no more than the order of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from post_training.recovery.signs import Stage
from post_training.report.run_folder import at

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
EXACT_LOSS = "actor_rollout_ref.overlay.exact_loss.enabled"
_UPDATE = (f"{_ACTOR}.ppo_micro_batch_size_per_gpu",)
_CRITIC = ("critic.ppo_micro_batch_size_per_gpu",)
_LOG_PROB = (f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{_REF}.log_prob_micro_batch_size_per_gpu")
# With dynamic batches these keys apply instead: the switch that turns them on, and the tokens of a micro batch.
_TOKENS = {
    _UPDATE[0]: (f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
    _CRITIC[0]: ("critic.use_dynamic_bsz", "critic.ppo_max_token_len_per_gpu"),
    _LOG_PROB[0]: (f"{_ROLLOUT}.log_prob_use_dynamic_bsz", f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"),
    _LOG_PROB[1]: (f"{_REF}.log_prob_use_dynamic_bsz", f"{_REF}.log_prob_max_token_len_per_gpu"),
}
# The engine's own key: verl passes engine_kwargs to it, but not the max_num_seqs beside them. A configuration need not
# have the key, so Hydra adds it; without it vLLM takes 256.
_SEQUENCES, _CACHE_SHARE = f"{_ROLLOUT}.engine_kwargs.vllm.max_num_seqs", f"{_ROLLOUT}.gpu_memory_utilization"
_USUAL_SEQUENCES = 256
_LEAST_CACHE_SHARE = 0.1


def reduced(config: Mapping[str, Any], stage: Stage | None) -> dict[str, int | float]:
    """Return new values of the keys that halve what the stage takes at once; empty if nothing is left to halve.

    Args:
        config: the job's resolved configuration.
        stage: where memory ran out; None if unknown, which halves all micro batches.
    """
    if stage == "rollout":
        return _rollout(config)
    update = _UPDATE + _CRITIC if at(config, "algorithm.adv_estimator") == "gae" else _UPDATE
    keys = {"update": update, "log_prob": _LOG_PROB, None: update + _LOG_PROB}[stage]
    if stage != "log_prob" and not at(config, EXACT_LOSS):
        return {}
    return {key: value for each in keys for key, value in _micro_batch(config, each).items()}


def _micro_batch(config: Mapping[str, Any], key: str) -> dict[str, int | float]:
    switch, tokens = _TOKENS[key]
    if at(config, switch):
        most, longest = at(config, tokens), _longest(config)
        return {tokens: max(longest, most // 2)} if isinstance(most, int) and most > longest else {}
    size = at(config, key)
    if not isinstance(size, int) or size < 2:
        return {}
    # The largest smaller divisor, so that the new size divides whatever the old one did: 8 -> 4, 9 -> 3, 7 -> 1.
    return {key: size // next(factor for factor in range(2, size + 1) if size % factor == 0)}


def _rollout(config: Mapping[str, Any]) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    sequences, share = at(config, _SEQUENCES) or _USUAL_SEQUENCES, at(config, _CACHE_SHARE)
    if isinstance(sequences, int) and sequences > 1:
        found[f"++{_SEQUENCES}"] = sequences // 2
    if isinstance(share, int | float) and share > _LEAST_CACHE_SHARE:
        found[_CACHE_SHARE] = round(max(_LEAST_CACHE_SHARE, share / 2), 4)
    return found


def _longest(config: Mapping[str, Any]) -> int:
    """Return the tokens of the longest sequence, the least that a micro batch must hold."""
    return int(at(config, "data.max_prompt_length") or 0) + int(at(config, "data.max_response_length") or 0)
