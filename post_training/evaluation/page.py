"""evaluation.html: results of one or several models and their answers, as one page without a server or a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from post_training.evaluation.problems import Question
from post_training.evaluation.results import Answers, Evaluated
from post_training.report import charts
from post_training.report.charts import Series
from post_training.report.run_page import environment
from post_training.report.samples import shortened

QUESTIONS = 200
"""Most questions on a page; those on which models differ come first."""


def render_page(models: Sequence[Evaluated], questions: Sequence[Question], settings: Mapping[str, Any]) -> str:
    """Render the page as HTML."""
    shown = sorted(range(len(questions)), key=lambda index: not _differ(models, index))[:QUESTIONS]
    samples = [_sample(models, questions[index], index) for index in shown]
    curves = [
        Series(
            model.name,
            [(1, estimates[f"avg@{model.samples}"].value)]
            + [(int(name[5:]), each.value) for name, each in estimates.items() if name.startswith("pass@")],
        )
        for model in models
        if model.samples > 1 and (estimates := model.estimates())
    ]
    return (
        environment()
        .get_template("evaluation.html")
        .render(
            models=[(model, model.estimates(), model.shares()) for model in models],
            differences=[(model, model.against(models[0])) for model in models[1:]],
            questions=len(questions),
            settings=settings,
            samples=samples,
            greedy=sorted({sample["greedy"] for sample in samples}),
            sampled=sorted({sample["sampled"] for sample in samples} - {""}),
            chart=charts.lines(curves, zero=True, over="k ="),
        )
    )


def _differ(models: Sequence[Evaluated], index: int) -> bool:
    return len({model.answers[index].greedy.right for model in models}) > 1


def _sample(models: Sequence[Evaluated], question: Question, index: int) -> dict[str, Any]:
    answers = [(model.name, model.answers[index]) for model in models]
    verdicts = ["right" if each.greedy.right else "wrong" for _, each in answers]
    return {
        "number": index + 1,
        "prompt": shortened(question.text),
        "truth": shortened(question.truth),
        "greedy": " → ".join(verdicts),
        "sampled": _share(answers[-1][1]),
        "answers": [
            (name, kind, answer, shortened(answer.text))
            for name, each in answers
            for kind, answer in [("greedy", each.greedy), *((f"sample {i + 1}", a) for i, a in enumerate(each.sampled))]
        ],
    }


def _share(answers: Answers) -> str:
    """Return how many of a question's samples are right: none, some or all; empty without samples."""
    if not answers.sampled:
        return ""
    right = answers.right_samples
    return "none" if right == 0 else "all" if right == len(answers.sampled) else "some"
