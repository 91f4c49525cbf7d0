"""Programs that see the device file of an NPU, or none, regardless of the machine."""

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
    """Return the source of ``program`` for ``python -c``, so that it sees ``/dev/davinci0``, or no such file."""
    return _PROLOGUE.format(device=device) + program
