"""The tokens that end an answer, from every file and setting that names one.

vLLM stops at the end token of its tokenizer, at those of generation_config.json, and at `stop_token_ids`. Without a
generation_config.json it takes those of config.json. Code that cuts, counts or judges answers must use the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENERATION, MODEL = "generation_config.json", "config.json"


class EndTokensError(ValueError):
    """The end tokens of a file cannot be read. The message is one sentence with the file, the value and the remedy."""


@dataclass(frozen=True)
class EndTokens:
    """Tokens that end an answer.

    Attributes:
        sources: Each file or setting with the tokens that it names, which may be none.
        ignored: Whether the engine continues past the model's end tokens (`ignore_eos`).
    """

    sources: tuple[tuple[str, tuple[int, ...]], ...]
    ignored: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """All end tokens in ascending order."""
        return tuple(sorted({token for _, named in self.sources for token in named}))

    def __str__(self) -> str:
        named = {token: [source for source, tokens in self.sources if token in tokens] for token in self.tokens}
        if not named:
            return "Answers end at no token" + (" (ignore_eos)" if self.ignored else "")
        return "Answers end at " + ", ".join(f"{token} ({' and '.join(by)})" for token, by in named.items())


def end_tokens(
    folder: Path,
    of_tokenizer: int | None,
    stop_token_ids: Sequence[int] | None = None,
    generation: str | None = None,
    ignore_eos: bool = False,
) -> EndTokens:
    """Resolve the tokens at which vLLM ends an answer of a model.

    Args:
        folder: The model's folder, with config.json and usually generation_config.json.
        of_tokenizer: The tokenizer's end token; None if it has none.
        stop_token_ids: Further tokens that the configuration names.
        generation: vLLM's argument `generation_config`: another folder, or one of its words for the model's own.
        ignore_eos: Whether answers continue past the model's end tokens; only `stop_token_ids` end them.

    Raises:
        EndTokensError: A file cannot be read, or its `eos_token_id` holds anything but tokens.
    """
    given = ("stop_token_ids", tuple(stop_token_ids or ()))
    if ignore_eos:
        return EndTokens((given,), ignored=True)
    place = folder if generation in (None, "auto", "vllm") else Path(str(generation))
    name = GENERATION if (place / GENERATION).is_file() else MODEL
    tokenizer = ("tokenizer", () if of_tokenizer is None else (of_tokenizer,))
    return EndTokens((tokenizer, (name, named_in(place / name)), given))


def named_in(file: Path) -> tuple[int, ...]:
    """Return the end tokens that a generation_config.json or config.json names; none if it is absent or says null.

    Raises:
        EndTokensError: It is no JSON, or its `eos_token_id` holds anything but tokens.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise EndTokensError(f"{file} is not JSON ({error}). Copy the model again") from error
    found = _value(values)
    named = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in named):
        raise EndTokensError(f"eos_token_id={json.dumps(found)} of {file} is invalid: not a token. Set it to token ids")
    return tuple(named)


def _value(values: Any) -> Any:
    """Return `eos_token_id`; a model with images may have it in its `text_config`."""
    if not isinstance(values, Mapping):
        return None
    of_text = values.get("text_config")
    return values.get("eos_token_id", of_text.get("eos_token_id") if isinstance(of_text, Mapping) else None)
