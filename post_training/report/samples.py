"""Samples of a run: prompts with responses and rewards, from its first step and its last."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from post_training.report.metrics import ReportError
from post_training.user_files import read_json

FIRST, LAST = "samples.first.json", "samples.last.json"
# Limits of a step's kept samples: prompts, responses of each, and characters of a text.
PROMPTS, RESPONSES, CHARACTERS = 4, 8, 4000

_UNSHOWN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True)
class Sample:
    """A response.

    Attributes:
        group: the same number for all responses to a prompt.
        tokens: number of tokens in the response, without padding.
    """

    group: int
    prompt: str
    response: str
    truth: str
    reward: float | None
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Return the sample as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step."""

    step: int
    samples: tuple[Sample, ...]


def shortened(text: str) -> str:
    """Shorten a text to CHARACTERS from its beginning and its end, with the number of omitted ones in between.

    Characters that no page can contain (control characters, halves of surrogate pairs) become U+FFFD.
    """
    text = _UNSHOWN.sub("\N{REPLACEMENT CHARACTER}", text)
    left_out = len(text) - CHARACTERS
    if left_out <= 0:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]} [... {left_out} characters ...] {text[-half:]}"


def read_samples(folder: Path) -> list[StepSamples]:
    """Read the samples that a run kept: those of the first step, then those of the last if it is another one.

    Raises:
        ReportError: a file is not in the format that a run writes; the message is one sentence.
    """
    found: dict[int, StepSamples] = {}
    for name in (FIRST, LAST):
        file = folder / name
        if not file.exists():
            continue
        try:
            content = read_json(file)
            samples = tuple(Sample(**sample) for sample in content["samples"])
            found[content["step"]] = StepSamples(int(content["step"]), samples)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ReportError(f"{file} does not contain samples of a step: {error!r}.") from error
    return [found[step] for step in sorted(found)]
