"""What others import: their modules are acted on when they import them, not before."""

import subprocess
import sys
import textwrap

import pytest


def run(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.parametrize("first", ["torch", "torch_npu", "npu_emulator", "torchair", "acl"])
def test_any_of_the_packages_can_be_imported_first(first):
    assert run(f"import {first}, torch, torch_npu, torchair, acl; print(torch.ones(1, device='npu').item())") == "1.0"


def test_importing_torch_brings_the_device_and_nothing_heavy():
    program = """
    import sys, torch
    heavy = {"torch._dynamo", "torch.utils.cpp_extension", "torch.utils.checkpoint", "transformers"} & set(sys.modules)
    print(hasattr(torch, "npu"), sorted(heavy), torch.npu.is_initialized())
    torch.ones(1, device="npu")
    print(torch.npu.is_initialized())
    """
    assert run(program).splitlines() == ["True [] False", "True"]


def test_dynamo_learns_the_device_when_it_is_imported():
    program = """
    import torch
    from torch._dynamo.device_interface import get_interface_for_device
    print(get_interface_for_device("npu").current_device(), get_interface_for_device("npu:1").is_available())
    """
    assert run(program) == "0 True"


def test_vllm_ascend_finds_its_kernels_here():
    program = """
    import sys, types, torch, torch_npu
    package = types.ModuleType("vllm_ascend")
    package.__path__ = []
    sys.modules["vllm_ascend"] = package
    import vllm_ascend.vllm_ascend_C
    tokens = torch.tensor([0, 3, 5, 9], device="npu")
    print(*(part.tolist() for part in torch.ops._C.get_masked_input_and_mask(tokens, 3, 6, 0, 9, 10)))
    """
    assert run(program) == "[0, 0, 2, 3] [True, False, False, False]"
