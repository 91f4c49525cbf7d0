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

    The text is three tables: relations, to which demands point; demands, to which documents point; and documents. As
    nested lists of one map, they took the compiler several times as long.

    Raises:
        ValueError: an exception names a demand that no document makes.
    """
    left = {(each["operator"], each["parameter"], each["demand"]) for each in exceptions}
    tables: tuple[list[str], list[str], list[str]] = ([], [], [])
    relations, parameters, documents = tables
    for line in sorted(rules.splitlines(), key=_operator):
        head, *described = line.split(" ")
        operator, _, chip = head.partition("|")
        places = {parameter.partition(":")[0]: at for at, parameter in enumerate(described)}
        documents.append(f'{{"{operator}", "{chip}", kDemands + {len(parameters)}, {len(described)}}}')
        for parameter in described:
            name, said, related = _read(parameter)
            for demand in [demand for demand in said if said[demand] and (operator, name, demand) in left]:
                left.remove((operator, name, demand))
                del said[demand]
            own = _relations({word: related[word] for word in _AGREEMENTS if word in said}, places)
            parameters.append(
                f'{{"{name}", {_bits_of_dtypes(said.get("dtypes", ""))}, {_bits_of_ranks(said.get("ranks", ""))}, '
                f'{said.get("required", "false")}, {said.get("contiguous", "false")}, "{said.get("values", "")}", '
                f"kRelations + {len(relations)}, {len(own)}}}"
            )
            relations += own
    if left:
        raise ValueError(f"documented_exceptions.toml lists rules that no document has: {sorted(left)}")
    relations.append("{}")  # an array has at least one element
    names = ("Relation kRelations", "Demand kDemands", "Document kDocuments")
    return "".join(f"constexpr {name}[] = {{\n{_rows(table)}}};\n" for name, table in zip(names, tables, strict=True))


def _operator(line: str) -> str:
    """Return the name of a line's operator, by which the emulated CANN searches the table of documents."""
    return line.partition(" ")[0].partition("|")[0]


def _rows(table: Sequence[str]) -> str:
    return "".join(f"{row},\n" for row in table)


def _read(parameter: str) -> tuple[str, dict[str, str], dict[str, list[str]]]:
    """Return a parameter's name, what its document says of it, and the other parameters of each relation."""
    head, *parts = parameter.split("|")
    typed, _, values = head.partition("=")
    dtypes, ranks, words = (*parts, "", "", "")[:3]
    said = {"dtypes": dtypes, "ranks": ranks, "values": values}
    related: dict[str, list[str]] = {}
    for word in filter(None, words.split(",")):
        word, _, others = word.partition("=")
        said[word] = "true"
        related.setdefault(word, []).append(others)
    return typed.partition(":")[0], said, related


def _relations(named: Mapping[str, Sequence[str]], places: Mapping[str, int]) -> list[str]:
    """Return relations as source text: `named` has the other parameters by word, `places` the number of each."""
    return [
        f"{{Agreement::{_AGREEMENTS[word]}, {' | '.join(f'1ull << {places[name]}' for name in others.split('+'))}}}"
        for word, all_of_them in named.items()
        for others in all_of_them
    ]


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
