"""End tokens of a run's answers, from its configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from post_training.end_tokens import EndTokens, end_tokens
from post_training.report.run_error import RunError


def end_tokens_of(rollout: Mapping[str, Any], folder: str, tokenizer: Any) -> EndTokens:
    """Resolve the end tokens of a run.

    Args:
        rollout: verl's node `actor_rollout_ref.rollout`.
        folder: The model's folder.
        tokenizer: The model's tokenizer, as verl has loaded it.

    Raises:
        EndTokensError: See `end_tokens`.
    """
    engine = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    return end_tokens(
        Path(folder).expanduser(),
        tokenizer.eos_token_id,
        rollout.get("stop_token_ids"),
        engine.get("generation_config"),
        bool(rollout.get("ignore_eos")),
    )


def without_stop_tokens(rollout: Any) -> Any:
    """Return verl's node `rollout` without `stop_token_ids`, which verl hands to vLLM as a list that vLLM rejects."""
    if rollout.get("stop_token_ids") is None:
        return rollout
    plain = copy.deepcopy(rollout)
    plain.stop_token_ids = None
    return plain


def stop_at(params: Any, ends: EndTokens, engine: Any) -> None:
    """Let an engine stop at these tokens and no others.

    Args:
        params: vLLM's SamplingParams of all answers, changed in place.
        ends: The tokens.
        engine: vLLM's LLMEngine, which adds those of its tokenizer and of the model's generation configuration.

    Raises:
        RunError: The engine also stops at other tokens of its own.
    """
    further = sorted(set() if ends.ignored else _added_by(engine) - set(ends.tokens))
    if further:
        raise RunError(
            f"vLLM also ends answers at the tokens {further}, which neither the model's folder nor "
            "actor_rollout_ref.rollout.stop_token_ids names. Use the tokenizer and the generation configuration of "
            "actor_rollout_ref.model.path for the engine"
        )
    params.stop_token_ids = list(ends.tokens)
    params.all_stop_token_ids.update(ends.tokens)


def _added_by(engine: Any) -> set[int]:
    processor = engine.processor
    found = processor.generation_config_fields.get("eos_token_id")
    named = set(found) if isinstance(found, list) else {found}
    return {*named, processor.input_preprocessor.get_eos_token_id()} - {None}
