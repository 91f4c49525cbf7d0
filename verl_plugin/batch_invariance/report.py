"""Prints the findings about a model as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def table(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of the tables: log-probs in each situation, operators, and the cost of each mode.

    Args:
        found: by mode, "off" and "on", the result of the engine without graphs; the results with graphs are under its
            key `graphs`.
    """
    return [*_log_probs(found), *_operators(found), *_cost(found)]


def _log_probs(found: Mapping[str, Any]) -> Iterator[str]:
    yield "\nLog-probs of the sample that differ from those of the sample alone"
    yield f"{'':40}" + "".join(f"{'mode ' + mode:>24}" for mode in found)
    names = list(next(iter(found.values()))["compared"])
    for name in names:
        yield f"{name:40}" + "".join(f"{_differ(each['compared'][name]):>24}" for each in found.values())
    for name in next(iter(found.values()))["graphs"]:
        cells = [_differ(against(each["alone"], each["graphs"][name]["alone"])) for each in found.values()]
        yield f"{'alone, ' + name:40}" + "".join(f"{cell:>24}" for cell in cells)


def differs(result: Mapping[str, Any]) -> bool:
    """Return whether any log-prob of a mode differs from that of the sample alone, with graphs or without."""
    graphs = [against(result["alone"], each["alone"]) for each in result["graphs"].values()]
    return any(each["differ"] for each in [*result["compared"].values(), *graphs])


def against(alone: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two answers in the form in which result files hold them."""
    from verl_plugin.batch_invariance.comparison import Answer, compare_log_probs

    one, another = (Answer(tuple(each["tokens"]), tuple(each["log_probs"])) for each in (alone, other))
    compared = compare_log_probs(one, another)
    return {"compared": compared.compared, "differ": compared.differ, "largest": compared.largest}


def _differ(compared: Mapping[str, Any]) -> str:
    largest = f" ({compared['largest']:.1e})" if compared["differ"] else ""
    return f"{compared['differ']} of {compared['compared']}{largest}"


def _operators(found: Mapping[str, Any]) -> Iterator[str]:
    yield "\nOperators that depend on the batch, in the order in which they were found"
    for mode, each in found.items():
        if not each["operators"]:
            yield f"mode {mode}: none"
        for operator in each["operators"]:
            yield f"mode {mode}: {operator['operator']}"
            yield f"    first in {operator['layer']}, token {operator['position']}, {operator['situation']}"
            yield f"    alone its input was {shapes(operator['alone'])}; there {shapes(operator['beside'])}"
            if others := operator["situations"][1:]:
                yield f"    also: {', '.join(others)}"
        if each["ended"]:
            yield f"mode {mode}: the search ended early: {each['ended']}"


def shapes(given: Sequence[Sequence[int]]) -> str:
    """Format shapes of tensors: `67x64, 64x192`."""
    return ", ".join("x".join(map(str, shape)) or "a number" for shape in given)


def _cost(found: Mapping[str, Any]) -> Iterator[str]:
    yield "\nCost of all situations together"
    yield f"{'':40}" + "".join(f"{'mode ' + mode:>24}" for mode in found)
    for key, name in (("steps", "steps"), ("slot_steps", "slot-steps")):
        yield f"{name:40}" + "".join(f"{each[key]:>24,}" for each in found.values())
    calls = {mode: sum(each["calls"].values()) for mode, each in found.items()}
    yield f"{'operators called for the sample alone':40}" + "".join(f"{each:>24,}" for each in calls.values())
    yield f"{'seconds on this host':40}" + "".join(f"{each['seconds']:>24.1f}" for each in found.values())
