"""Builds the device as one extension module, and refuses to do so on a machine that has the real one."""

import importlib.util
import os
from pathlib import Path

# An emulator that is installed already, and perhaps does not load, is not needed to build one.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from setuptools import setup  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402

ROOT = Path(__file__).resolve().parent


def check_machine(**places) -> None:
    """Raise RuntimeError if a real NPU is installed here; `places` as in presence.find_real_npu."""
    spec = importlib.util.spec_from_file_location("presence", ROOT / "src" / "npu_emulator" / "presence.py")
    presence = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(presence)
    presence.refuse_real_npu(**places)


def joined_sources(parts: int) -> list[str]:
    """Files that include all of csrc/: what torch's headers cost is then paid once a part, and not once a file."""
    sources = sorted((ROOT / "csrc").glob("*.cpp"))
    folder = ROOT / "build" / "joined"
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(parts):
        text = "".join(f'#include "../../csrc/{source.name}"\n' for source in sources[part::parts])
        path = folder / f"part_{part}.cpp"
        if not path.exists() or path.read_text() != text:  # a file that is written anew is compiled anew
            path.write_text(text)
    return [f"build/joined/part_{part}.cpp" for part in range(parts)]


class BuildModules(build_py):
    """Also puts the line beside the packages that lets Python choose the engine when it starts."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            name = "npu_emulator_engine.pth"
            self.copy_file(str(ROOT / "src" / name), str(Path(self.build_lib) / name))


if __name__ == "__main__":
    check_machine()
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    extension = CppExtension(
        "npu_emulator._C",
        joined_sources(2),
        extra_compile_args=["-std=c++17", "-O2", "-g0"],
        define_macros=[("USE_C10D_GLOO", None)],
    )
    setup(
        ext_modules=[extension],
        cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True), "build_py": BuildModules},
    )
