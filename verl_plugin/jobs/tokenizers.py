"""Rejects a tokenizer with which verl's agent loop would not start, by making the calls of the loop's worker."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_plugin.sentences import invalid

MODEL = "actor_rollout_ref.model"
_PROMPT = [{"role": "user", "content": "1 + 1"}]
# One of these is in every folder that transformers reads a tokenizer from.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def tokenizer_problems(
    model: Mapping[str, Any], model_type: str | None, data: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield why verl cannot make prompts with a model's tokenizer; nothing if it is not on this machine.

    Args:
        model: the keys of `actor_rollout_ref.model`.
        model_type: from the model's config.json; verl uses it to choose how turns end.
        data: the keys of `data`.
    """
    key = "tokenizer_path" if model.get("tokenizer_path") else "path"
    folder, data = model.get(key), data or {}
    if folder is None or not any(Path(str(folder), name).is_file() for name in _FILES):
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _make_prompt(str(folder), model, model_type, data)
    except Exception as error:  # whatever transformers or verl raises, the worker would end with it
        lines = str(error).strip().splitlines()
        reason = f"verl's agent loop cannot use its tokenizer with a {model_type} model"
        remedy = "a folder with the model's published tokenizer and its chat template"
        yield invalid(f"{MODEL}.{key}", folder, f"{reason}: {lines[0] if lines else type(error).__name__}", remedy)


def _make_prompt(folder: str, model: Mapping[str, Any], model_type: str | None, data: Mapping[str, Any]) -> None:
    """Make a prompt of one message as `HFModelConfig` and `AgentLoopBase` of verl 0.9.1 do."""
    from verl.utils.tokenizer import hf_processor, hf_tokenizer
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    trust = bool(model.get("trust_remote_code"))
    tokenizer = hf_tokenizer(folder, trust_remote_code=trust)
    processor = hf_processor(folder, trust_remote_code=trust)
    template = model.get("custom_chat_template") or getattr(tokenizer, "chat_template", None)
    for each in (tokenizer, processor):
        if each is not None and template and (model.get("custom_chat_template") or not each.chat_template):
            each.chat_template = template
    builder = create_continuous_token_builder(
        tokenizer,
        hf_model_type=model_type,
        chat_template_kwargs=dict(data.get("apply_chat_template_kwargs") or {}),
        mm_processor_kwargs=dict(data.get("mm_processor_kwargs") or {}),
        processor=processor,
    )
    if processor is None:  # some processors only take a message in parts
        builder.build_initial_tokens(_PROMPT)
