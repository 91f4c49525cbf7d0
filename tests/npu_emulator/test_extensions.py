"""Extensions for the NPU are served by emulated kernels, others are compiled, and CANN's variables are set."""

import os
import subprocess
import sys
import types

import pytest
import torch
import torch_npu  # noqa: F401
from torch.utils import cpp_extension

from npu_emulator import extensions, toolkit

SOURCE = """
#include <torch_npu/csrc/framework/OpCommand.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("npu_matmul_add_fp32", &matmul_add, "adds");
    m.def( "npu_matmul_add_fp32", &matmul_add_too);
    m.def("npu_unheard_of", &unheard_of);
}
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "kernels.cpp"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("flags", [["-L/somewhere -lascendcl"], ["-L/lib", "-ltorch_npu"], ["-latb"]])
def test_an_extension_for_the_npu_is_not_compiled(source, flags):
    module = cpp_extension.load("kernels", [source], extra_ldflags=flags, verbose=True)
    total = torch.ones(2, 2, device="npu")
    module.npu_matmul_add_fp32(torch.ones(3, 2, device="npu"), torch.ones(3, 2, device="npu"), total)
    assert total.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    with pytest.raises(NotImplementedError, match="npu_unheard_of of the extension kernels is not emulated"):
        module.npu_unheard_of(1)
    assert not hasattr(module, "npu_gmm")


def test_one_source_may_be_given_as_it_is(source):
    assert extensions.exported_functions([source]) == ["npu_matmul_add_fp32", "npu_unheard_of"]
    assert isinstance(cpp_extension.load("kernels", str(source), extra_ldflags=["-lascendcl"]), types.ModuleType)


def test_other_extensions_are_compiled(source, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        cpp_extension, "load", lambda name, sources, *rest, **named: compiled.append((name, rest, named))
    )
    extensions.intercept()
    cpp_extension.load("plain", [source], extra_ldflags=["-lm"], verbose=True)
    assert compiled == [("plain", (None, None, ["-lm"]), {"verbose": True})]


def test_the_variables_of_the_toolkit_are_set_unless_they_are():
    program = "import torch_npu, os; print(os.environ['ASCEND_HOME_PATH']); print(os.environ['ATB_HOME_PATH'])"
    environment = {name: value for name, value in os.environ.items() if name not in toolkit.VARIABLES}
    environment["ATB_HOME_PATH"] = "/elsewhere"
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert os.path.isdir(printed[0]) and printed[1] == "/elsewhere"
