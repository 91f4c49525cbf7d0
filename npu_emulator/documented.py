"""The rules in the operators' documents, `documented_rules.txt`, as source text for the emulated CANN."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# aclDataType's names where they differ from the documents'. No tensor can have a type that its header lacks.
_ENUMERATORS = {"BFLOAT16": "BF16"}
_AGREEMENTS = {
    "shape": "kShape", "broadcasts": "kBroadcasts", "broadcast_of": "kBroadcastOf", "dtype": "kDtype",
}  # fmt: skip
_NOT_IN_THE_HEADER = re.compile(r"FLOAT8_|FLOAT4_|HIFLOAT8")


def demands(rules: str, exceptions: Sequence[Mapping[str, str]]) -> str:
    """Return source text with the documents' demands on each operator's parameters, without those in `exceptions`.

    Raises:
        ValueError: an exception names a demand that no document makes.
    """
    left = {(each["operator"], each["parameter"], each["demand"]) for each in exceptions}
    lines = []
    for line in rules.splitlines():
        head, *parameters = line.split(" ")
        operator, _, chip = head.partition("|")
        places = {parameter.partition(":")[0]: at for at, parameter in enumerate(parameters)}
        entries = []
        for parameter in parameters:
            head, *parts = parameter.split("|")
            typed, _, values = head.partition("=")
            name = typed.partition(":")[0]
            dtypes, ranks, words = (*parts, "", "", "")[:3]
            said = {"dtypes": dtypes, "ranks": ranks, "values": values}
            relations: dict[str, list[str]] = {}
            for word in filter(None, words.split(",")):
                word, _, others = word.partition("=")
                said[word] = "true"
                relations.setdefault(word, []).append(others)
            for demand in [demand for demand in said if said[demand] and (operator, name, demand) in left]:
                left.remove((operator, name, demand))
                del said[demand]
            entries.append(
                f'{{"{name}", {_bits_of_dtypes(said.get("dtypes", ""))}, {_bits_of_ranks(said.get("ranks", ""))}, '
                f'{said.get("required", "false")}, {said.get("contiguous", "false")}, "{said.get("values", "")}", '
                f"{{{_relations({word: relations[word] for word in _AGREEMENTS if word in said}, places)}}}}}"
            )
        lines.append(f'{{"{operator}", {{"{chip}", {{{", ".join(entries)}}}}}}},\n')
    if left:
        raise ValueError(f"documented_exceptions.toml lists rules that no document has: {sorted(left)}")
    return "".join(lines)


def _relations(named: Mapping[str, Sequence[str]], places: Mapping[str, int]) -> str:
    """Return relations as source text: `named` has the other parameters by word, `places` the number of each."""
    return ", ".join(
        f"{{Agreement::{_AGREEMENTS[word]}, {' | '.join(f'1ull << {places[name]}' for name in others.split('+'))}}}"
        for word, all_of_them in named.items()
        for others in all_of_them
    )


def _bits_of_dtypes(names: str) -> str:
    kept = [_ENUMERATORS.get(name, name) for name in names.split(",") if name and not _NOT_IN_THE_HEADER.match(name)]
    return " | ".join(f"1ull << ACL_{name}" for name in kept) or "0"


def _bits_of_ranks(ranks: str) -> int:
    first, between, last = ranks.partition("-")
    allowed = range(int(first), int(last) + 1) if between else [int(rank) for rank in ranks.split(",") if rank]
    return sum(1 << rank for rank in allowed)


def documented_demands() -> str:
    """Return the source text of the committed rules and their exceptions."""
    exceptions = tomllib.loads((ROOT / "documented_exceptions.toml").read_text())["exception"]
    return demands((ROOT / "documented_rules.txt").read_text(), exceptions)
