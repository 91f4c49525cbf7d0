"""Judged answers of models and the results computed from them, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from post_training.estimates import CONFIDENCE, Estimate, bootstrap, pass_at_k, wilson
from post_training.evaluation.problems import Question

GREEDY = "greedy"


@dataclass(frozen=True)
class Answer:
    """One answer of a model.

    Attributes:
        cut: Whether it was cut at the length limit.
        score: The reward.
        right: Whether the reward counts it as correct.
        boxed: Whether it has an answer where the rule looks for one.
    """

    text: str
    tokens: int
    cut: bool
    score: float
    right: bool
    boxed: bool


@dataclass(frozen=True)
class Answers:
    """A model's answers to one question; `sampled` is empty if only greedy ones were asked for."""

    greedy: Answer
    sampled: tuple[Answer, ...]

    @property
    def right_samples(self) -> int:
        """Number of sampled answers that are right."""
        return sum(answer.right for answer in self.sampled)


@dataclass(frozen=True)
class Evaluated:
    """A model with its answers, in the order of the questions."""

    name: str
    path: str
    answers: Sequence[Answers]

    @property
    def samples(self) -> int:
        """Number of sampled answers per question."""
        return len(self.answers[0].sampled)

    def estimates(self) -> dict[str, Estimate]:
        """Return greedy, avg@n, and pass@k for the powers of two up to n and for n itself."""
        found = {GREEDY: wilson(sum(each.greedy.right for each in self.answers), len(self.answers))}
        return found | {name: bootstrap(values) for name, values in self._by_problem().items() if name != GREEDY}

    def against(self, before: Evaluated) -> dict[str, Estimate]:
        """Estimate this model's results minus those of another, paired by problem: both answered the same ones."""
        mine, other = self._by_problem(), before._by_problem()
        return {
            name: bootstrap([a - b for a, b in zip(mine[name], other[name], strict=True)])
            for name in mine
            if name in other
        }

    def shares(self) -> dict[str, float]:
        """Return means over all answers, without intervals."""
        every = [answer for each in self.answers for answer in (each.greedy, *each.sampled)]
        return {
            "score": fmean(answer.score for answer in every),
            "boxed": fmean(answer.boxed for answer in every),
            "cut": fmean(answer.cut for answer in every),
            "tokens": fmean(answer.tokens for answer in every),
        }

    def _by_problem(self) -> dict[str, list[float]]:
        """Return one value per problem for each estimate, which is their mean."""
        values = {GREEDY: [float(each.greedy.right) for each in self.answers]}
        n = self.samples
        if n:
            values[f"avg@{n}"] = [each.right_samples / n for each in self.answers]
        for k in tried(n):
            values[f"pass@{k}"] = [pass_at_k(n, each.right_samples, k) for each in self.answers]
        return values


def tried(samples: int) -> list[int]:
    """Return the k of pass@k for a number of samples: 2, 4, ... and the number itself. pass@1 is the mean."""
    powers = [2**power for power in range(1, max(1, samples).bit_length()) if 2**power < samples]
    return [*powers, samples] if samples > 1 else []


def table(models: Sequence[Evaluated]) -> str:
    """Format the results of every model, and the difference of each further model from the first."""
    rows = [(model.name, {name: str(each) for name, each in model.estimates().items()}, model) for model in models]
    names = list(rows[0][1])
    lines = [["", *names, "boxed", "cut", "tokens"]]
    for name, results, model in rows:
        shares = model.shares()
        cells = [f"{shares['boxed']:.2f}", f"{shares['cut']:.2f}", f"{shares['tokens']:.0f}"]
        lines.append([name, *(results[each] for each in names), *cells])
    for model in models[1:]:
        more = model.against(models[0])
        cells = [f"{each.value:+.3f} [{each.low:+.3f}, {each.high:+.3f}]" for each in (more[name] for name in names)]
        lines.append([f"{model.name} - {models[0].name}", *cells, "", "", ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if not index else cell.rjust(width)
                  for index, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def as_json(models: Sequence[Evaluated], questions: Sequence[Question], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything: settings, results, and every question with every answer."""
    return {
        "settings": dict(settings),
        "confidence": CONFIDENCE,
        "intervals": {GREEDY: "Wilson's score", "others": "bootstrap over problems, percentiles"},
        "models": [
            {
                "name": model.name,
                "path": model.path,
                "estimates": {name: asdict(each) for name, each in model.estimates().items()},
                "shares": model.shares(),
                "against_the_first": {name: asdict(each) for name, each in model.against(models[0]).items()},
            }
            for model in models
        ],
        "questions": [
            {
                "messages": list(question.messages),
                "truth": question.truth,
                "source": question.source,
                "answers": {model.name: asdict(model.answers[index]) for model in models},
            }
            for index, question in enumerate(questions)
        ],
    }
