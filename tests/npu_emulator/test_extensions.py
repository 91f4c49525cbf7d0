"""Extensions in C++ that are compiled at run time against CANN, as MindSpeed does with its kernels."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch_npu
from torch.utils import cpp_extension

from npu_emulator import engine

pytestmark = pytest.mark.slow

WHEEL = Path(torch_npu.__file__).parent
# Where MindSpeed says that everything is.
INCLUDED = (WHEEL / "include", WHEEL / "include/third_party/acl/inc", WHEEL / "include/third_party/hccl/inc")


def linked() -> list[str]:
    """What an extension links, with the folders that the variables of CANN give."""
    cann, transformers = Path(os.environ["ASCEND_HOME_PATH"]), Path(os.environ["ATB_HOME_PATH"])
    flags = [f"-L{cann / 'lib64'}", "-lascendcl", f"-L{WHEEL / 'lib'}", "-ltorch_npu"]
    return [*flags, f"-L{transformers / 'lib'}", "-lasdops", "-llcal", "-latb"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("extension")


@pytest.fixture(scope="module")
def extension(folder) -> ModuleType:
    headers = [*INCLUDED, Path(os.environ["ASCEND_HOME_PATH"], "include"), Path(os.environ["ATB_HOME_PATH"], "include")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # where ninja is
        return cpp_extension.load(
            name="extension",
            sources=[str(Path(__file__).with_name("extension.cpp"))],
            extra_include_paths=[str(path) for path in headers],
            extra_cflags=["-O0"],
            extra_ldflags=linked(),
            build_directory=str(folder),
        )


def test_it_runs_on_the_emulated_libraries_of_the_process(extension):
    assert extension.chip() == torch.npu.get_device_name(0)
    numbers = torch.arange(6.0)
    assert torch.equal(extension.negative(numbers.npu()).cpu(), -numbers)
    left, right = numbers.view(2, 3), numbers.view(3, 2)
    assert torch.equal(extension.product(left.npu(), right.npu()).cpu(), left @ right)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {Path(line.split()[-1]) for line in maps if line.endswith(("libascendcl.so", "libatb.so", "libopapi.so"))}
    assert {path.parent for path in mapped} == {engine.FOLDER / "lib"}, "none is loaded a second time"


@pytest.mark.parametrize("place", ["ASCEND_HOME_PATH", "ATB_HOME_PATH"])
def test_it_does_not_link_without_the_toolkit(extension, folder, place):
    compiler = cpp_extension.get_cxx_compiler()

    def link(flags: list[str]) -> subprocess.CompletedProcess[str]:
        command = [compiler, "-shared", str(folder / "extension.o"), *flags, "-o", str(folder / "linked.so")]
        return subprocess.run(command, capture_output=True, text=True)

    assert link(linked()).returncode == 0
    lib = "lib64" if place == "ASCEND_HOME_PATH" else "lib"
    without = link([flag for flag in linked() if flag != f"-L{os.environ[place]}/{lib}"])
    assert without.returncode and "cannot find -l" in without.stderr
