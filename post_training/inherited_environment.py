"""Environment variables that a job inherits from the shell that starts it, and those that are dropped or rejected.

All are passed on except the variables of `inherited_variables.txt`, which describe a process of another job, and on
emulated dies those that choose NPUs. Variables with a value with which no job can run are rejected by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
"""CANN's list of the NPUs that a process sees."""
_TABLE = Path(__file__).with_name("inherited_variables.txt")
_CHOOSES_NPUS = (VISIBLE, "ASCEND_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
# By variable: whether a value is invalid, and the reason with the remedy.
_REJECTED: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": (
        lambda value: value == "0",
        "torch does not load torch_npu, so no process finds an NPU. Unset it",
    ),
    "VLLM_PLUGINS": (
        lambda value: "ascend" not in value.split(","),
        "vLLM does not load vLLM-Ascend. Unset it, or add ascend to it",
    ),
    "PYTHONOPTIMIZE": (
        lambda value: value not in ("", "0"),
        "it disables assert, with which verl and Megatron check their configuration. Unset it",
    ),
}


class EnvironmentRejected(ValueError):
    """A variable has a value with which no job can run; the message is one sentence."""


def dropped_names() -> list[str]:
    """Return the names in the table; those that end in `*` are prefixes."""
    lines = (line.partition("#")[0].strip() for line in _TABLE.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def drop_inherited(environment: MutableMapping[str, str], emulated: bool) -> list[str]:
    """Remove the variables of other jobs from an environment and return their names.

    Args:
        environment: is changed.
        emulated: whether the job runs on emulated dies, which are numbered from 0.
    """
    names = [*dropped_names(), *(_CHOOSES_NPUS if emulated else ())]
    beginnings = tuple(name[:-1] for name in names if name.endswith("*"))
    found = sorted(name for name in environment if name in names or name.startswith(beginnings))
    for name in found:
        del environment[name]
    return found


def check_inherited(environment: Mapping[str, str]) -> None:
    """Reject a value with which no job can run.

    Raises:
        EnvironmentRejected: one sentence that names the variable.
    """
    for name, (cannot_be, reason) in _REJECTED.items():
        value = environment.get(name)
        if value is not None and cannot_be(value):
            raise EnvironmentRejected(f"The environment variable {name}={value[:100]} is invalid: {reason}.")


def describe_visible(environment: Mapping[str, str], dies: int) -> str | None:
    """Return one sentence if the list of visible NPUs does not have `dies` NPUs; None if it has, or without a list."""
    value = environment.get(VISIBLE)
    if value is None:
        return None
    entries = [entry.strip() for entry in value.split(",")]
    is_list = all(entry.isascii() and entry.isdigit() for entry in entries) and len(set(entries)) == len(entries)
    if is_list and len(entries) == dies:
        return None
    shown = f"it shows {len(entries)} NPUs, but" if is_list else "not a list of numbers such as 0,1;"
    fitting = ",".join(map(str, range(dies)))
    return f"{VISIBLE}={value[:100]} is invalid: {shown} the job takes {dies}. Unset it, or set it to {fitting}"
