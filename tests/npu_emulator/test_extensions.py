"""Extensions in C++ that are compiled at run time against CANN, as MindSpeed does with its kernels."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch_npu
from torch.utils import cpp_extension

from npu_emulator import engine
from tests.npu_emulator.mapped_files import mapped_files

pytestmark = pytest.mark.slow

PACKAGES = Path(torch_npu.__file__).parents[1]


@dataclass(frozen=True)
class Build:
    """A build folder with a link to the installed packages.

    torch does not quote the paths that it builds with, and a checkout's own may hold spaces and quotes.
    """

    folder: Path

    def installed(self, path: Path | str) -> Path:
        return self.folder / "packages" / Path(path).relative_to(PACKAGES)

    def headers(self) -> list[str]:
        """Return the include folders that MindSpeed gives."""
        wheel, kits = PACKAGES / "torch_npu/include", (os.environ["ASCEND_HOME_PATH"], os.environ["ATB_HOME_PATH"])
        places = [wheel, wheel / "third_party/acl/inc", wheel / "third_party/hccl/inc"]
        return [str(self.installed(place)) for place in (*places, *(Path(kit, "include") for kit in kits))]

    def linked(self) -> list[str]:
        """Return the link flags of an extension, with the folders in CANN's variables."""
        cann, transformers = (self.installed(os.environ[name]) for name in ("ASCEND_HOME_PATH", "ATB_HOME_PATH"))
        wheel = self.installed(PACKAGES / "torch_npu")
        flags = [f"-L{cann / 'lib64'}", "-lascendcl", f"-L{wheel / 'lib'}", "-ltorch_npu"]
        return [*flags, f"-L{transformers / 'lib'}", "-lasdops", "-llcal", "-latb"]


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Build:
    folder = tmp_path_factory.mktemp("extension")
    (folder / "packages").symlink_to(PACKAGES)
    shutil.copy(Path(__file__).with_name("extension.cpp"), folder)
    return Build(folder)


@pytest.fixture(scope="module")
def extension(build) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # where ninja is
        patch.setattr(cpp_extension, "_TORCH_PATH", str(build.installed(PACKAGES / "torch")))
        patch.setattr(cpp_extension, "TORCH_LIB_PATH", str(build.installed(PACKAGES / "torch/lib")))
        return cpp_extension.load(
            name="extension",
            sources=[str(build.folder / "extension.cpp")],
            extra_include_paths=build.headers(),
            extra_cflags=["-O0"],
            extra_ldflags=build.linked(),
            build_directory=str(build.folder),
        )


def test_it_runs_on_the_emulated_libraries_of_the_process(extension):
    assert extension.chip() == torch.npu.get_device_name(0)
    numbers = torch.arange(6.0)
    assert torch.equal(extension.negative(numbers.npu()).cpu(), -numbers)
    left, right = numbers.view(2, 3), numbers.view(3, 2)
    assert torch.equal(extension.product(left.npu(), right.npu()).cpu(), left @ right)
    libraries = ("libascendcl.so", "libatb.so", "libopapi.so")
    folders = {Path(file).parent for file in mapped_files() if file.endswith(libraries)}
    assert folders == {engine.FOLDER / "lib"}, "none is loaded a second time"


@pytest.mark.parametrize("place", ["ASCEND_HOME_PATH", "ATB_HOME_PATH"])
def test_it_does_not_link_without_the_toolkit(extension, build, place):
    compiler = cpp_extension.get_cxx_compiler()

    def link(flags: list[str]) -> subprocess.CompletedProcess[str]:
        command = [compiler, "-shared", "extension.o", *flags, "-o", "linked.so"]
        return subprocess.run(command, cwd=build.folder, capture_output=True, text=True)

    assert link(build.linked()).returncode == 0
    lib = build.installed(os.environ[place]) / ("lib64" if place == "ASCEND_HOME_PATH" else "lib")
    without = link([flag for flag in build.linked() if flag != f"-L{lib}"])
    assert without.returncode and "cannot find -l" in without.stderr
