"""Builds the emulated CANN into the package, except on a machine that has a real NPU.

The wheel is for machines like this one, by processor and C library, and for every Python: nothing in it is compiled
against Python.
"""

import importlib.util
import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
# The headers of torch and torch_npu are needed, and no device: an emulator that is installed already, and perhaps does
# not load, is not needed to build one.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from setuptools import setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402


def check_machine(**places: Path) -> None:
    """Raise RuntimeError if a real NPU is installed here; `places` as in presence.find_real_npu."""
    spec = importlib.util.spec_from_file_location("presence", ROOT / "src" / "npu_emulator" / "presence.py")
    presence = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(presence)
    presence.refuse_real_npu(**places)


def installed_torch_npu() -> Path:
    """Return the folder of the installed torch_npu, without importing it; ends with a sentence if there is none."""
    found = find_spec("torch_npu")
    if found is None or found.origin is None:
        sys.exit("error: torch_npu is not installed, but its headers are needed to compile. Install it first.")
    return Path(found.origin).parents[1]


def requirements() -> list[str]:
    """Return the torch_npu and torch whose headers this is compiled against: the package works with no others."""
    installed = {name: metadata.version(name).partition("+")[0] for name in ("torch", "torch_npu") if find_spec(name)}
    return [f"{name}=={version}" for name, version in installed.items()]


class BuildPackage(build_py):
    """Also builds the libraries, and adds the .pth line that Python reads when it starts."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        from build import build_cann

        packages = Path(self.build_lib)
        build_cann(installed_torch_npu(), packages / "npu_emulator")
        self.copy_file(str(ROOT / "src" / "npu_emulator.pth"), str(packages / "npu_emulator.pth"))


class ForEveryPython(bdist_wheel):
    """Names a wheel by its platform alone."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    check_machine()
    setup(install_requires=requirements(), cmdclass={"build_py": BuildPackage, "bdist_wheel": ForEveryPython})
