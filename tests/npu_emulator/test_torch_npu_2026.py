"""The emulator below a torch_npu of 2026, in .venv/torch_npu_2.13, beside the pinned one."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_emulator.engine_process import ROOT, finish, start
from tests.npu_emulator.test_operator_table import differences, read_calls, read_written
from tests.npu_emulator.test_wheel import TRAINS

OTHER = ROOT / ".venv" / "torch_npu_2.13" / "bin" / "python"
needs_the_other = pytest.mark.skipif(
    not OTHER.exists(), reason="NOT RUN: requirements/torch_npu_2.13.lock is not installed in .venv/torch_npu_2.13"
)
pytestmark = pytest.mark.slow

TABLES = [("op_plugin", ""), ("op_plugin", "_2.13"), ("vllm_ascend", ""), ("mindspeed", "")]
# Checks of the device program whose results are the same to the last digit, in words too.
SAME = (
    "chip arithmetic thread_without_device fused graph triangles routing layer_norm metered metered_memory"
    " task_group_codes"
).split()
ASKS_FOR_WHAT_IS_NOT_EMULATED = """
import torch, torch_npu
from npu_emulator import engine
library = engine.library()
print(library.aclrtBinaryLoadFromData(None, 0, None, None))
library.aclGetRecentErrMsg.restype = __import__("ctypes").c_char_p
print(library.aclGetRecentErrMsg().decode())
"""


# Kinds of memory (0 the host's, 1 a device's, 2 neither), an option, and a call of the host in the order of a stream.
NEWER_FUNCTIONS = """
import ctypes
import torch, torch_npu
from npu_emulator import engine
library = engine.library()

class Attributes(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("kind", ctypes.c_int), ("others", ctypes.c_uint32 * 5)]

def memory(tensor):
    found = Attributes()
    assert library.aclrtPointerGetAttributes(ctypes.c_void_p(tensor.data_ptr()), ctypes.byref(found)) == 0
    return found.kind, found.id

print(memory(torch.ones(4, device="npu:1")), memory(torch.ones(4).pin_memory()), memory(torch.ones(4)))
option, value = ctypes.c_int(0), ctypes.c_int64(-1)
assert library.aclrtSetSysParamOpt(option, ctypes.c_int64(1)) == 0
assert library.aclrtGetSysParamOpt(option, ctypes.byref(value)) == 0
print(value.value)
seen = []
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda given: seen.append((given, tensor.tolist())))
tensor = torch.zeros(2).pin_memory()
tensor.copy_(torch.ones(2, device="npu"), non_blocking=True)
stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
assert library.aclrtLaunchHostFunc(stream, function, ctypes.c_void_p(7)) == 0
torch.npu.synchronize()
print(seen)
"""

# Functions of the host that a graph calls at each replay, what a graph holds as JSON, memory of the host that is
# registered, and the dies that a process sees.
NEWER_CALLS = """
import json, os
import torch, torch_npu
os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "0"
print(torch.npu.device_count())
runtime, host = torch_npu.npu.npurt(), torch.ones(20)
pinned = 0x10000000
print(*(int(runtime.npuHostRegister(host.data_ptr(), bytes, pinned)) for bytes in (80, 0)),
      int(runtime.npuHostUnregister(host.data_ptr())))
stream, graph, seen = torch.npu.Stream(), torch.npu.NPUGraph(), []
torch_npu.npu._subscribe_report(stream)
total = torch.zeros(3, device="npu")
with torch.npu.graph(graph, stream=stream):
    total += 1
    torch_npu.npu._launch_host_func(stream, seen.append, "called")
for _ in range(2):
    graph.replay()
torch.npu.synchronize()
print(seen, total.tolist())
graph.debug_dump("graph.json")
print([task["name"] for task in json.load(open("graph.json"))])
torch_npu.npu._unsubscribe_report(stream)
try:
    torch_npu.npu._launch_host_func(stream, seen.append, "called")
except RuntimeError as refused:
    print("no thread subscribed for this stream" in str(refused))
"""


def asked_of_the_other(program: str, folder: Path) -> str:
    """Run a program there, outside the repository, and return its output."""
    ended = subprocess.run(
        [OTHER, "-W", "ignore", "-c", program], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


@needs_the_other
def test_a_step_of_training_equals_that_of_the_cpu(tmp_path):
    assert asked_of_the_other(TRAINS, tmp_path) == "trained on 8\n"


@needs_the_other
def test_programs_find_what_they_find_on_the_pin(tmp_path):
    found = []
    for number, python in enumerate((OTHER, sys.executable)):
        results = tmp_path / f"{number}.json"
        variables = {"TASK_QUEUE_ENABLE": "0", "NPU_EMULATOR_CAPACITY_MB": "256", "NPU_EMULATOR_DEVICES": "2"}
        finish(start("device_program", results, *SAME, python=python, **variables))
        found.append(json.loads(results.read_text()))
    assert not [check for check, answer in found[0].items() if "raised" in answer], found[0]
    assert [check for check in SAME if found[0][check] != found[1][check]] == []


@needs_the_other
def test_operators_have_the_parameters_of_both_releases_calls(tmp_path):
    written = read_written(tmp_path / "results.json", OTHER)
    calls = read_calls(*(f"{name}_calls{rest}.txt" for name, rest in TABLES))
    assert len(written) > 500 and "aclnnQuantMatmulV5" in written, "which the pins' op-plugin does not call"
    assert differences(written, calls) == []
    assert differences(written | {"aclnnQuantMatmulV5": ["Tensor"]}, calls), "control: others are differences"


@needs_the_other
def test_what_it_asks_for_and_is_not_there_rejected_by_name(tmp_path):
    assert asked_of_the_other(ASKS_FOR_WHAT_IS_NOT_EMULATED, tmp_path).splitlines() == [
        "207000", "aclrtBinaryLoadFromData is not emulated"
    ]  # fmt: skip


@needs_the_other
def test_functions_that_only_it_asks_for_do_what_its_headers_say(tmp_path):
    assert asked_of_the_other(NEWER_FUNCTIONS, tmp_path).splitlines() == [
        "(1, 1) (0, 0) (2, 0)", "1", "[(7, [1.0, 1.0])]"
    ]  # fmt: skip


@needs_the_other
def test_host_functions_of_graphs_registered_memory_and_dies_are_there(tmp_path):
    counted, registered, called, tasks, refused = asked_of_the_other(NEWER_CALLS, tmp_path).splitlines()
    assert counted == "1"
    assert registered.split()[0] == registered.split()[2] == "0" != registered.split()[1]
    assert called == "['called', 'called'] [2.0, 2.0, 2.0]"
    assert "aclrtLaunchCallback" in tasks and "InplaceAdds" in tasks
    assert refused == "True"


@needs_the_other
def test_operators_that_only_it_calls_give_what_plain_torch_gives():
    found = json.loads(finish(start("newer_operators_program", python=OTHER)).splitlines()[-1])
    graphs = found.pop("graphs")
    assert found.pop("attention") < 1e-3, "values of 16 bits"
    assert found.pop("quantised") == 0
    assert found.keys() == {"halves", "neighbours", "fast GELU"} and max(found.values()) < 1e-6, found
    assert len(graphs) == 6 and all(graphs.values()), graphs


@needs_the_other
def test_its_package_is_for_that_torch_npu_alone(tmp_path):
    program = "from importlib import metadata; print(*metadata.requires('npu-emulator'))"
    assert asked_of_the_other(program, tmp_path) == "torch==2.13.0 torch_npu==2.13.0\n"


@pytest.fixture
def build(monkeypatch):
    """Return the module that builds the emulator, which is in no package."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # set by the module too
    monkeypatch.syspath_prepend(ROOT / "npu_emulator")
    for name in ("build", "documented"):
        monkeypatch.setitem(sys.modules, name, None)  # put back as it was at the end
        del sys.modules[name]
    return importlib.import_module("build")


@pytest.mark.parametrize("installed", ["2.5.1.post1", "2.10.0.post4", "2.13.0"])
def test_it_is_built_for_the_releases_that_it_knows(build, monkeypatch, installed):
    monkeypatch.setattr(build.metadata, "version", lambda name: installed)
    assert build.release() == build.RELEASES[installed.partition(".post")[0]]


def test_it_is_built_for_no_other_release(build, monkeypatch):
    monkeypatch.setattr(build.metadata, "version", lambda name: "2.6.0")
    with pytest.raises(SystemExit) as end:
        build.release()
    assert end.value.code == (
        "error: torch_npu 2.6.0 is installed, but the emulator supports 2.5.1, 2.10.0, 2.13.0. Install one of these."
    )


@pytest.mark.parametrize(("cann", "has_npu_smi"), [("8.2.RC1", False), ("9.1.0", True), ("10.0.0", True)])
def test_versions_of_cann_are_compared_as_numbers(build, monkeypatch, tmp_path, cann, has_npu_smi):
    """A text of "10" would sort before "9"."""
    monkeypatch.setattr(build, "release", lambda: build.Release(cann, "Ascend910B3", ()))
    build.make_toolkit(tmp_path)
    assert (tmp_path / "bin" / "npu-smi").exists() == has_npu_smi
