"""Samples of a run: prompts with their responses and rewards, of its first step and of its last."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from post_training.report.metrics import ReportError
from post_training.user_files import read_json

FIRST, LAST = "samples.first.json", "samples.last.json"
# A run keeps this many prompts of a step, with at most so many responses each, and of a text so many characters.
PROMPTS, RESPONSES, CHARACTERS = 4, 8, 4000

_UNSHOWN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True)
class Sample:
    """One response. group: the same for all responses to one prompt; tokens: of the response, without padding."""

    group: int
    prompt: str
    response: str
    truth: str
    reward: float | None
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


@dataclass(frozen=True)
class StepSamples:
    """Those of one step."""

    step: int
    samples: tuple[Sample, ...]


def shortened(text: str) -> str:
    """At most CHARACTERS of a text, its beginning and its end, with the number of those left out between them.

    What no page can hold (control characters, halves of surrogate pairs) becomes U+FFFD.
    """
    text = _UNSHOWN.sub("\N{REPLACEMENT CHARACTER}", text)
    left_out = len(text) - CHARACTERS
    if left_out <= 0:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]} [... {left_out} characters ...] {text[-half:]}"


def read_samples(folder: Path) -> list[StepSamples]:
    """The samples that a run kept, of the first step and then of the last where it is another one.

    Raises:
        ReportError: a file is not in the form that a run writes; one sentence.
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
            raise ReportError(f"{file} does not hold samples of a step: {error!r}.") from error
    return [found[step] for step in sorted(found)]
