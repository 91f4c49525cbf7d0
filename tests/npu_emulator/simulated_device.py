"""A program that sees the device file of an NPU, or none, whatever the machine has."""

_PROLOGUE = """
import pathlib
glob = pathlib.Path.glob
def with_device(folder, pattern):
    if str(folder) == "/dev" and pattern.startswith("davinci"):
        return [folder / "davinci0"] if {device} else []
    return glob(folder, pattern)
pathlib.Path.glob = with_device
"""


def seeing_device(program: str, *, device: bool) -> str:
    """Source of ``program``, to be run with ``python -c``, where ``/dev`` holds ``davinci0``, or no such file."""
    return _PROLOGUE.format(device=device) + program
