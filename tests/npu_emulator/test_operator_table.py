"""Every emulated operator's parameters against the calls of it by op-plugin and MindSpeed, from committed extracts."""

import json
import sys
from pathlib import Path

import pytest

from tests.npu_emulator.engine_process import finish, start

EMULATOR = Path(__file__).parents[2] / "npu_emulator"
UNKNOWN = {"?", "pointer"}
# Bytes of the whole numbers. A narrow one read as a wide one is a difference.
WIDTHS = {"int8": 1, "uint8": 1, "int32": 4, "DataType": 4, "int64": 8, "uint64": 8}


def read_calls(*tables: str) -> dict[str, list[list[str]]]:
    """Return by operator the types of every form of its call."""
    calls: dict[str, list[list[str]]] = {}
    for table in tables or ("op_plugin_calls.txt", "mindspeed_calls.txt"):
        for line in (EMULATOR / table).read_text().splitlines():
            name, *words = line.split(" ")
            calls.setdefault(name, []).append([word.rsplit(":", 1)[1] for word in words])
    return calls


def differences(written: dict[str, list[str]], calls: dict[str, list[list[str]]]) -> list[str]:
    """Return operators that nothing calls, and calls whose number, order or types of arguments differ from ours."""
    found = []
    for name, types in sorted(written.items()):
        if name not in calls:
            found.append(f"{name}: nothing calls it")
        for call in calls.get(name, ()):
            if len(call) != len(types) or any(
                theirs not in UNKNOWN and not is_same(ours, theirs) for ours, theirs in zip(types, call, strict=True)
            ):
                found.append(f"{name}: written {' '.join(types)}, called {' '.join(call)}")
    return found


def is_same(ours: str, theirs: str) -> bool:
    """Whether an argument passed as `theirs` may be read as `ours`: an integer has one register, whatever its width."""
    return ours == theirs or (ours in WIDTHS and theirs in WIDTHS and WIDTHS[ours] <= WIDTHS[theirs])


def read_written(results: Path, python: str | Path = sys.executable) -> dict[str, list[str]]:
    """Return by emulated operator the types of its parameters, as the libraries of an environment have them."""
    finish(start("device_program", results, "operators", python=python))
    lines = json.loads(results.read_text())["operators"].splitlines()
    return {name: types.split() for name, types in (line.split(":") for line in lines)}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, list[str]]:
    return read_written(tmp_path_factory.mktemp("operators") / "results.json")


def test_every_written_operator_has_the_parameters_of_its_calls(written):
    calls = read_calls()
    assert len(written) > 250 and len(calls) > 600
    assert differences(written, calls) == []


def test_a_wrong_type_a_missing_argument_and_an_invented_operator_are_differences(written):
    calls = read_calls()
    for wrong in (["Tensor", "Tensor", "int64", "Tensor"], ["Tensor", "Tensor", "Tensor"]):
        assert differences(written | {"aclnnAdd": wrong}, calls)
    assert differences({"aclnnMm": ["Tensor", "Tensor", "Tensor", "int64"]}, calls), "a byte read as eight"
    assert differences({"aclnnInvented": ["Tensor"]}, calls) == ["aclnnInvented: nothing calls it"]
