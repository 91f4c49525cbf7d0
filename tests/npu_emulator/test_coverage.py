"""The list of operators: emulated, called, not emulated."""

import json
import subprocess
import sys

import torch_npu

from npu_emulator import coverage
from npu_emulator.operators import emulated


def test_every_emulated_operator_is_listed_and_can_be_called_by_name():
    listed = coverage.measure().calls
    assert set(listed) == {name.split(".")[0] for name in emulated()}
    for name in listed:
        namespace, short = name.split("::")
        if namespace in ("npu", "atb"):
            holder = torch_npu if namespace == "npu" or short.startswith("_npu_") else torch_npu.atb
            assert getattr(holder, short).__name__ == short


def test_operators_of_the_catalogue_are_either_emulated_or_refuse_by_name():
    measured = coverage.measure()
    assert not set(measured.not_emulated) & set(measured.calls)
    assert "npu::npu_ciou" in measured.not_emulated and "npu::npu_swiglu" in measured.calls
    assert len(coverage.catalogue()) == len(set(coverage.catalogue()))


def test_calls_are_added_up_over_meter_files(tmp_path):
    for number in (1, 2):
        found = {"operators": {"npu::npu_swiglu": {"calls": number}, "aten::mm": {"calls": 9}}}
        (tmp_path / f"{number}.json").write_text(json.dumps(found))
    measured = coverage.measure(sorted(tmp_path.glob("*.json")))
    assert measured.calls["npu::npu_swiglu"] == 3 and measured.reached == ["npu::npu_swiglu"]


def test_the_command_prints_the_list():
    printed = subprocess.run(
        [sys.executable, "-m", "npu_emulator", "coverage"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    described = {line.split()[0]: " ".join(line.split()[1:]) for line in printed}
    assert described["npu::npu_swiglu"].startswith("emulated, not called; reached by MindSpeed, MindSpeed-LLM, vllm-")
    assert described["npu::npu_silu"] == "emulated, not called" and described["npu::npu_ciou"] == "not emulated"
    assert described["npu::npu_quant_matmul"] == "not emulated; elsewhere, for weights quantised to W8A8 or W4A8"
    assert described["_C::rotary_embedding"].startswith("emulated")
    assert "are not emulated" in printed[-1]
