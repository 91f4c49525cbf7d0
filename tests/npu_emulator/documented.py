"""Reads `documented_rules.txt`, the demands of operators' documents, without the exceptions."""

import importlib.util
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "npu_emulator"
RULES, EXCEPTIONS = FOLDER / "documented_rules.txt", FOLDER / "documented_exceptions.toml"
# aclDataType of the element types that a tensor of torch can have.
DTYPES = {
    "FLOAT": 0, "FLOAT16": 1, "INT8": 2, "INT32": 3, "UINT8": 4, "INT16": 6, "INT64": 9, "DOUBLE": 11, "BOOL": 12,
    "COMPLEX64": 16, "COMPLEX128": 17, "BFLOAT16": 27,
}  # fmt: skip

RELATIONS = ("shape", "broadcasts", "broadcast_of", "dtype")


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operator and the demands on it; an empty set or text demands nothing."""

    name: str
    kind: str
    dtypes: frozenset[str] = frozenset()
    ranks: frozenset[int] = frozenset()
    required: bool = False
    contiguous: bool = False
    values: str = ""
    relations: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Relations to other parameters: ("dtype", ("self",)), ("broadcast_of", ("self", "other"))."""
    can_be_given: bool = True
    """False for a tensor of types that torch does not have."""

    def allowed(self, numbers: Iterable[int]) -> list[int]:
        """Return those integers of some that the parameter may have; another allowed one if it may have none."""
        if not self.values:
            return list(numbers)
        low, between, high = self.values.partition("..")
        if not between:
            return [int(each) for each in self.values.split(",")]
        among = (number for number in numbers if (not low or number >= int(low)) and (not high or number <= int(high)))
        return list(among) or [int(low or high)]


def load(name: str) -> ModuleType:
    """Load a program beside the emulated CANN's sources; like the programs that it imports it is in no package."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"emulator_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def read_ranks(text: str) -> frozenset[int]:
    first, between, last = text.partition("-")
    return frozenset(range(int(first), int(last) + 1) if between else map(int, filter(None, text.split(","))))


def read_chips(text: str) -> dict[str, str]:
    """Return the family of chips, A2 or A3, of every operator that the other family lacks."""
    heads = (line.split(" ", 1)[0].split("|") for line in text.splitlines())
    return {head[0]: head[1] for head in heads if len(head) == 2}


def read_rules(text: str, exceptions: str | None = None) -> dict[str, list[Parameter]]:
    """Return the parameters of every operator, in order, without the demands in `exceptions` (the file's, if None)."""
    rules: dict[str, list[Parameter]] = {}
    for line in text.splitlines():
        first, *words = line.split(" ")
        operator = first.partition("|")[0]
        rules[operator] = []
        for word in words:
            head, *parts = word.split("|")
            dtypes, ranks, said = (*parts, "", "", "")[:3]
            typed, _, values = head.partition("=")
            name, _, kind = typed.partition(":")
            alone = [each for each in said.split(",") if "=" not in each]
            related = [each.split("=") for each in said.split(",") if "=" in each]
            possible = frozenset(filter(None, dtypes.split(","))) & DTYPES.keys()
            if dtypes and not possible:
                rules[operator].append(Parameter(name, kind, can_be_given=False))
                continue
            rules[operator].append(
                Parameter(
                    name,
                    kind,
                    possible,
                    read_ranks(ranks),
                    "required" in alone,
                    "contiguous" in alone,
                    values,
                    tuple((relation, tuple(others.split("+"))) for relation, others in related),
                )
            )
        absent = {each.name for each in rules[operator] if not each.can_be_given}
        rules[operator] = [
            replace(each, relations=tuple(one for one in each.relations if absent.isdisjoint(one[1])))
            for each in rules[operator]
        ]
    for each in tomllib.loads(EXCEPTIONS.read_text() if exceptions is None else exceptions)["exception"]:
        if each["operator"] not in rules:
            continue
        rules[each["operator"]] = [
            without(parameter, each["demand"]) if parameter.name == each["parameter"] else parameter
            for parameter in rules[each["operator"]]
        ]
    return rules


def without(parameter: Parameter, demand: str) -> Parameter:
    """Return the parameter without one kind of demand."""
    if demand in RELATIONS:
        return replace(parameter, relations=tuple(each for each in parameter.relations if each[0] != demand))
    empty = {"dtypes": frozenset(), "ranks": frozenset(), "values": ""}.get(demand, False)
    return replace(parameter, **{demand: empty})
