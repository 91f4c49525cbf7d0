"""Calls every emulated operator with arguments that its document allows, and for each demand with a forbidden one.

Started by `test_documented_rules`. Only the first of an operator's two functions is called, which takes the arguments;
nothing runs on a device.
"""

import ctypes
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch  # noqa: F401 - which brings what the library links

from npu_emulator import engine
from tests.npu_emulator.documented import DTYPES, Parameter, read_chips, read_rules

NULL_POINTER, INVALID = 161001, 161002
MEMORY = ctypes.create_string_buffer(4096)
LIBRARY = engine.library()
NUMBERS = {
    "bool": ctypes.c_bool, "int8": ctypes.c_int8, "int32": ctypes.c_int32, "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64, "float": ctypes.c_float, "double": ctypes.c_double, "DataType": ctypes.c_int32,
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """The argument for a parameter.

    It is a tensor with `size` elements in every dimension, or a tensor of twos with exchanged strides; or `value`, if
    it is a number or a string.
    """

    dtype: str = "FLOAT"
    rank: int = 1
    size: int = 1
    is_null: bool = False
    is_turned: bool = False
    value: str = ""


def pointer(name: str, *arguments: object) -> ctypes.c_void_p:
    function = getattr(LIBRARY, name)
    function.restype = ctypes.c_void_p
    return ctypes.c_void_p(function(*arguments))


def tensor(argument: Argument) -> ctypes.c_void_p:
    sizes = [argument.size] * argument.rank
    strides = [argument.size ** (argument.rank - at - 1) for at in range(argument.rank)]
    if argument.is_turned:
        sizes[-2:], strides[-2:] = [2, 2], [1, 2]
    shape = (ctypes.c_int64 * argument.rank)(*sizes)
    return pointer(
        "aclCreateTensor", shape, ctypes.c_uint64(argument.rank), DTYPES[argument.dtype],
        (ctypes.c_int64 * argument.rank)(*strides), ctypes.c_int64(0), 2, shape, ctypes.c_uint64(argument.rank), MEMORY,
    )  # fmt: skip


def passed(kind: str, argument: Argument) -> object:
    """Return the C value of an argument."""
    if kind in NUMBERS:
        return NUMBERS[kind](int(argument.value or 0))
    if kind == "char*":
        return ctypes.c_char_p(argument.value.encode())
    if argument.is_null:
        return ctypes.c_void_p()
    if kind == "Tensor":
        return tensor(argument)
    if kind == "TensorList":
        return pointer("aclCreateTensorList", (ctypes.c_void_p * 1)(tensor(argument)), ctypes.c_uint64(1))
    if kind == "Scalar":
        return pointer("aclCreateScalar", MEMORY, DTYPES[argument.dtype])
    return ctypes.c_void_p()  # no array is the empty one


def call(operator: str, kinds: list[str], arguments: list[Argument]) -> tuple[int, str]:
    """Call an operator and return CANN's code and message."""
    function = getattr(LIBRARY, f"{operator}GetWorkspaceSize")
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    values = [passed(kind, argument) for kind, argument in zip(kinds, arguments, strict=True)]
    code = function(*values, ctypes.byref(size), ctypes.byref(executor))
    LIBRARY.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return code, (LIBRARY.aclGetRecentErrMsg() or b"").decode()


def legal(parameters: list[Parameter]) -> list[Argument]:
    """Return an argument for each parameter that all demands allow, of float32 and two dimensions if possible."""
    dtypes = common(parameters, [each.dtypes or frozenset(DTYPES) for each in parameters], {"dtype"})
    ranks = common(parameters, [each.ranks or frozenset(range(9)) for each in parameters], {"shape", "broadcast_of"})
    return [
        Argument(
            "FLOAT" if "FLOAT" in of_types else min(of_types),
            min(of_ranks, key=lambda rank: (abs(rank - 2), rank)),
            is_null=not each.can_be_given,
            value=re.split(r",|\.\.", each.values)[0],
        )
        for each, of_types, of_ranks in zip(parameters, dtypes, ranks, strict=True)
    ]


def common(parameters: list[Parameter], allowed: list[frozenset], relations: set[str]) -> list[frozenset]:
    """Intersect the choices of each parameter with those of the parameters related to it, directly or indirectly.

    Raises:
        ValueError: nothing is left for a parameter.
    """
    names, left = [each.name for each in parameters], list(allowed)
    related = [
        (at, names.index(other))
        for at, each in enumerate(parameters)
        for relation, others in each.relations
        for other in others
        if relation in relations
    ]
    for _ in parameters:  # as often as the longest chain of relations may need
        for one, other in related:
            left[one] = left[other] = left[one] & left[other]
    if not all(left):
        raise ValueError(
            f"no {' or '.join(relations)} is allowed for {names[left.index(frozenset())]} and its relations"
        )
    return left


def in_float32(parameters: list[Parameter], arguments: list[Argument]) -> list[Argument]:
    """Return legal arguments, but with float32 wherever a type of 16 bits is allowed."""
    return [
        replace(argument, dtype="FLOAT") if parameter.dtypes & {"FLOAT16", "BFLOAT16"} else argument
        for parameter, argument in zip(parameters, arguments, strict=True)
    ]


def beyond(parameter: Parameter) -> str:
    """Return a value that a number or a string may not have."""
    if parameter.kind == "char*":
        return "nonsense"
    if parameter.kind == "bool":
        return str(1 - int(parameter.values))
    low, between, high = parameter.values.partition("..")
    if between:
        return str(int(low) - 1 if low else int(high) + 1)
    return str(max(map(int, low.split(","))) + 1)


def illegal(parameter: Parameter, given: Argument) -> Iterator[tuple[str, Argument, int]]:
    """Yield for each demand on a parameter its kind, an argument that breaks it alone, and CANN's code for that."""
    if parameter.dtypes and (dtypes := sorted(set(DTYPES) - parameter.dtypes)):
        # FLOAT where it is forbidden: what reference runs may give to kernels of 16 bits.
        yield "dtypes", replace(given, dtype="FLOAT" if "FLOAT" in dtypes else dtypes[0]), INVALID
    if parameter.ranks and (ranks := set(range(10)) - parameter.ranks):
        yield "ranks", replace(given, rank=max(ranks)), INVALID
    if parameter.required:
        yield "required", replace(given, is_null=True), NULL_POINTER
    if parameter.contiguous and max(parameter.ranks or {2}) >= 2:
        yield "contiguous", replace(given, rank=max(2, given.rank), is_turned=True), INVALID
    if parameter.values:
        yield "values", replace(given, value=beyond(parameter)), INVALID


def unrelated(
    parameters: list[Parameter], arguments: list[Argument], at: int
) -> Iterator[tuple[str, list[Argument], str]]:
    """Yield for each relation of a parameter its kind, arguments that break it alone, and a word of CANN's message."""
    parameter, given = parameters[at], arguments[at]
    for relation in sorted({relation for relation, _ in parameter.relations}):
        if relation == "dtype":
            others = (parameter.dtypes or frozenset(DTYPES)) - {given.dtype}
            if others:
                yield relation, [*arguments[:at], replace(given, dtype=min(others)), *arguments[at + 1 :]], "same dtype"
        elif given.rank:
            of_twos = [replace(each, size=2) for each in arguments]
            yield relation, [*of_twos[:at], replace(given, size=3), *of_twos[at + 1 :]], "size"


def try_operator(
    operator: str, parameters: list[Parameter], arguments: list[Argument]
) -> tuple[dict[str, int], list[str]]:
    """Return how many demands of each kind were tried beside legal arguments, and everything that went wrong."""
    kinds = [each.kind for each in parameters]
    counts: dict[str, int] = {}
    code, words = call(operator, kinds, arguments)
    if code:
        return counts, [f"{operator}: arguments that its document takes are refused with {code}: {words}"]
    wrong = []
    for at, parameter in enumerate(parameters):
        for demand, argument, expected in illegal(parameter, arguments[at]):
            counts[demand] = counts.get(demand, 0) + 1
            code, words = call(operator, kinds, [*arguments[:at], argument, *arguments[at + 1 :]])
            if code != expected or parameter.name not in words or operator not in words:
                wrong.append(f"{operator}, {demand} of {parameter.name}: {code} {words}")
        for demand, changed, word in unrelated(parameters, arguments, at):
            counts[demand] = counts.get(demand, 0) + 1
            code, words = call(operator, kinds, changed)
            if code != INVALID or not re.search(rf"\b{parameter.name}\b.*{word}|{word}.*\b{parameter.name}\b", words):
                wrong.append(f"{operator}, {demand} of {parameter.name}: {code} {words}")
    return counts, wrong


def written_operators() -> dict[str, list[str]]:
    """Return the emulated operators with the kinds of their parameters in order."""
    function = LIBRARY.npu_emulator_cann_operators
    function.restype = ctypes.c_char_p
    lines = (line.split(": ") for line in function().decode().splitlines() if ": " in line)
    return {operator: kinds.split() for operator, kinds in lines}


def main() -> None:
    results, rules, written = Path(sys.argv[1]), Path(sys.argv[2]), written_operators()
    documented, chips = read_rules(rules.read_text()), read_chips(rules.read_text())
    chip = "A2" if "910B" in os.environ.get("NPU_EMULATOR_CHIP", "") else "A3"
    counts: dict[str, int] = {}
    wrong, different, refused_in_float32, absent = [], [], [], []
    for operator in sorted(written.keys() & documented.keys()):
        kinds = written[operator]
        try:
            arguments = legal(documented[operator])
        except ValueError as contradiction:
            wrong.append(f"{operator}: {contradiction}")
            continue
        if chips.get(operator, chip) != chip:
            absent.append([operator, *call(operator, kinds, arguments)])
            continue
        if kinds != [each.kind for each in documented[operator]]:
            different.append(f"{operator}: written {kinds}, documented {[each.kind for each in documented[operator]]}")
            continue
        if call(operator, kinds, in_float32(documented[operator], arguments))[0]:
            refused_in_float32.append(operator)
        tried, found = try_operator(operator, documented[operator], arguments)
        wrong += found
        for demand, count in tried.items():
            counts[demand] = counts.get(demand, 0) + count
    undocumented = sorted(written.keys() - documented.keys())
    answer = {"counts": counts, "wrong": wrong, "different": different, "undocumented": undocumented}
    results.write_text(json.dumps(answer | {"refused_in_float32": refused_in_float32, "absent": absent}))


if __name__ == "__main__":
    main()
