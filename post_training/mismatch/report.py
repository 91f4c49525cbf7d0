"""Reports a comparison as a sentence, as a table on the terminal, as JSON, and as a page with charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from post_training.mismatch import points
from post_training.mismatch.comparison import Comparison, PointResult
from post_training.mismatch.points import in_words
from post_training.report import charts
from post_training.report.charts import Series

if TYPE_CHECKING:
    from rich.table import Table

_MOST_ROWS, _AROUND = 40, 4
_LOOK_AT = {
    points.EMBEDDING: "the embedding's weights, also a tensor-parallel shard",
    points.ATTENTION_NORM: "weights or epsilon of the norm",
    points.ATTENTION: "weights of the attention, also a tensor-parallel shard, its norms, its scale",
    points.AFTER_ATTENTION: "the residual stream",
    points.MLP_NORM: "weights or epsilon of the norm",
    points.ROUTER_LOGITS: "weights of the router, or their dtype",
    points.EXPERTS: "the router's bias, groups, or number of experts of a token",
    points.MLP: "weights of the MLP or of experts, also a shard, the placement of experts, the weights of their sum",
    points.OUTPUT: "the residual stream",
    points.FINAL_NORM: "weights or epsilon of the final norm",
    points.LOGITS: "weights of the output layer, also a tensor-parallel shard",
    points.LOG_PROBS: "the temperature: logits agree, so one side divides them by a different one",
}
_OF_ATTENTION = {
    "every token but the first of each sequence": "the rotary embedding (base, scaling), the mask or the KV cache: a "
    "first token, which attends only to itself, agrees",
    "every decoded token and no token of a prompt": "code used only in decoding: the KV cache, weights derived for it "
    "(MLA's absorbed ones)",
}


def sentence(comparison: Comparison) -> str:
    """Return the result as a sentence, with its numbers and where to look for the cause."""
    first = comparison.first
    if first is None:
        last = comparison.results[-1]
        swapped = (
            f"; {comparison.swapped} of {comparison.tokens} tokens went to different experts"
            if comparison.swapped
            else ""
        )
        return (
            f"{comparison.dtype}: rollout and training agree at all {len(comparison.results)} points, "
            f"{in_words(last.point)} within {last.worst:.2g}{swapped}{_unjudged(comparison)}"
        )
    at = "" if first.at is None else f", worst at token {first.at[1]} of sequence {first.at[0]}"
    amount = f"by {first.worst:.2g} where {first.tolerance:g} is allowed"
    if first.part == points.EXPERTS:
        amount = f"for {first.worst:.0%} of the tokens where {first.tolerance:.0%} may be near ties"
    named = f" Its experts: {', '.join(map(str, first.experts))}." if first.experts else ""
    return (
        f"{comparison.dtype}: rollout and training first diverge at {in_words(first.point)}: {amount}, at "
        f"{first.where}{at}.{named} Look at {look_at(first)}."
    )


def look_at(result: PointResult) -> str:
    """Return the likely causes if this point is the first one that diverges."""
    if result.experts:
        return "the weights of these experts, and which rank serves them"
    special = _OF_ATTENTION.get(result.where) if result.part == points.ATTENTION else None
    return special or _LOOK_AT[result.part]


def _unjudged(comparison: Comparison) -> str:
    lost = next((each for each in comparison.results if each.tokens and not each.judged), None)
    if lost is None:
        return ""
    return (
        f"; from {in_words(lost.point)} on every token has seen different experts, so none is compared. "
        "Compare in float32"
    )


def table(comparison: Comparison) -> Table:
    """Return a table of the points; if there are many, those around the first that diverges, and the last ones."""
    from rich.table import Table

    made = Table(title=f"{comparison.architecture} in {comparison.dtype}: {comparison.tokens} tokens")
    for name in ("point", "tokens", "median", "worst", "allowed", ""):
        made.add_column(name, justify="left" if name in ("point", "") else "right", no_wrap=True)
    results, before = shown(comparison), None
    for index, each in results:
        if before is not None and index > before + 1:
            made.add_row("...", "", "", "", "", "")
        before = index
        verdict = "[red]parts here[/red]" if each is comparison.first else "[red]differs[/red]" if each.diverges else ""
        if not each.judged:
            verdict = "not judged"
        numbers = (f"{each.judged} of {each.tokens}", f"{each.median:.2g}", f"{each.worst:.2g}", f"{each.tolerance:g}")
        made.add_row(in_words(each.point), *numbers, verdict)
    return made


def shown(comparison: Comparison) -> list[tuple[int, PointResult]]:
    """Return the points that are printed, with their indices."""
    numbered = list(enumerate(comparison.results))
    if len(numbered) <= _MOST_ROWS:
        return numbered
    first = comparison.first
    middle = comparison.results.index(first) if first else 0
    return [each for each in numbered if abs(each[0] - middle) <= _AROUND or each[0] >= len(numbered) - _AROUND]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the whole comparison as JSON-ready values."""
    said = asdict(comparison)
    said["results"] = [
        result | {"diverges": each.diverges} for result, each in zip(said["results"], comparison.results, strict=True)
    ]
    first = comparison.first
    return {"sentence": sentence(comparison), "first": None if first is None else first.point} | said


def render_page(comparisons: Sequence[Comparison], about: Mapping[str, str]) -> str:
    """Return the page as HTML: for each comparison a sentence, differences over layers, points, and expert swaps."""
    from post_training.report.run_page import environment

    shown_ones = [
        {
            "found": each,
            "sentence": sentence(each),
            "layers": charts.lines(_over_layers(each), logarithmic=True, over="layer"),
            "choices": charts.lines(_of_choices(each), zero=True, over="layer"),
            "swaps": [result for result in each.results if result.swaps],
        }
        for each in comparisons
    ]
    return environment().get_template("mismatch.html").render(comparisons=shown_ones, about=about, in_words=in_words)


def _over_layers(comparison: Comparison) -> list[Series]:
    """Return for each part the worst difference of all tokens over layers, and the allowed difference."""
    parts = [part for part in points.OF_A_LAYER if part != points.EXPERTS]
    series = [Series(part.replace("_", " "), _worst(comparison, part)) for part in parts]
    layers = sorted({each.layer for each in comparison.results if each.layer is not None})
    return [*series, Series("allowed", [(layer, comparison.tolerance.relative) for layer in layers])]


def _of_choices(comparison: Comparison) -> list[Series]:
    return [Series("share of tokens with other experts", _worst(comparison, points.EXPERTS))]


def _worst(comparison: Comparison, part: str) -> list[tuple[int, float]]:
    """Return a part's worst difference of all tokens by layer; values that are not finite cannot be drawn."""
    return [
        (each.layer or 0, each.worst_of_all)
        for each in comparison.results
        if each.part == part and math.isfinite(each.worst_of_all)
    ]
