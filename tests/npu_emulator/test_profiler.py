"""torch_npu's own profiler, and its own analysis, on what the emulated CANN records."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from npu_emulator import engine
from tests.npu_emulator.engine_process import finish, start

MSPROF = Path(__file__).parents[2] / "npu_emulator" / "msprof.py"


def rows(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def output_of(folder: Path) -> Path:
    (output,) = folder.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT")
    return output


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """torch_npu's analysis of two steps: a product and its exponential, then a sine and the replay of a graph."""
    folder = tmp_path_factory.mktemp("recorded")
    said = finish(start("profiler_program", folder))
    assert "ERROR" not in said, said
    installed = engine.FOLDER / "toolkit" / "bin" / "msprof"
    assert installed.read_text() == MSPROF.read_text() and os.access(installed, os.X_OK)
    return output_of(folder)


def test_kernels_are_those_of_the_recorded_steps(recorded):
    """The first step, the last, and the capture are the control: their work is in no table."""
    kernels = Counter((row["Step Id"], row["Name"]) for row in rows(recorded / "kernel_details.csv"))
    assert kernels == {
        ("1", "aclnnMatmul"): 1,
        ("1", "aclnnInplaceExp"): 1,
        ("2", "aclnnSin"): 1,
        ("2", "aclnnMatmul"): 1,
        ("2", "aclnnSwiGlu"): 1,
        ("2", "aclnnInplaceExp"): 1,
    }
    cores = {row["Accelerator Core"] for row in rows(recorded / "kernel_details.csv")}
    assert cores == {"HOST_CPU"}, "nothing says that a core of an NPU computed it"


def test_steps_are_divided_into_what_the_device_did(recorded):
    kernels, steps = rows(recorded / "kernel_details.csv"), rows(recorded / "step_trace_time.csv")
    assert [row["Step"] for row in steps] == ["1", "2"]
    for step in steps:
        took = sum(float(row["Duration(us)"]) for row in kernels if row["Step Id"] == step["Step"])
        assert float(step["Computing"]) == pytest.approx(took, rel=1e-3) and took > 0
        assert float(step["Communication"]) == 0


def test_arrows_go_from_torch_to_the_kernel(recorded):
    entries = json.loads((recorded / "trace_view.json").read_text())
    kernels = {(entry["pid"], entry["tid"], entry["ts"]): entry["name"] for entry in entries if entry["ph"] == "X"}
    ends = [entry for entry in entries if entry.get("cat") == "async_npu" and entry["ph"] == "f"]
    found = Counter(kernels[entry["pid"], entry["tid"], entry["ts"]] for entry in ends)
    assert found["aclnnMatmul"] >= 1 and found["aclnnInplaceExp"] >= 1
    starts = {entry["id"] for entry in entries if entry.get("cat") == "async_npu" and entry["ph"] == "s"}
    assert starts == {entry["id"] for entry in ends}


def test_tables_of_functions_and_of_operators_count_the_same(recorded):
    operators = {row["OP Type"]: int(row["Count"]) for row in rows(recorded / "op_statistic.csv")}
    assert operators == {"Matmul": 2, "InplaceExp": 2, "Sin": 1, "SwiGlu": 1}
    functions = {row["API Name"]: int(row["Count"]) for row in rows(recorded / "api_statistic.csv")}
    assert functions["aclnnMatmul"] == 1 == functions["aclmdlRIExecuteAsync"] and "aclnnSwiGlu" not in functions


def test_collectives_are_communication(tmp_path):
    ranks = [start("profiler_program", tmp_path, rank, 2) for rank in range(2)]
    for process in ranks:
        finish(process)
    for rank in range(2):
        output = output_of(tmp_path / str(rank))
        kernels = [(row["Device_id"], row["Type"]) for row in rows(output / "kernel_details.csv")]
        assert sorted(kernels) == [(str(rank), "InplaceExp"), (str(rank), "hcom_allReduce_")]
        (step,) = rows(output / "step_trace_time.csv")
        assert float(step["Communication"]) > 0 and step["Device_id"] == str(rank)


def test_the_way_vllm_ascend_asks_for_a_profile(tmp_path):
    said = finish(start("profiler_program", tmp_path, "worker"))
    assert "ERROR" not in said, said
    kernels = [row["Name"] for row in rows(output_of(tmp_path) / "kernel_details.csv")]
    assert kernels == ["aclnnMatmul"]
    traced = json.loads((output_of(tmp_path) / "trace_view.json").read_text())
    assert [entry["name"] for entry in traced].count("aten::matmul") == 1


def msprof() -> ModuleType:
    spec = importlib.util.spec_from_file_location("msprof", MSPROF)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, msprof=module):  # dataclasses look there for their own module
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path) -> Path:
    """A recording on two devices, in microseconds from 100 on; the clock is 1 s behind the time of day."""
    (tmp_path / "host" / "data").mkdir(parents=True)
    start_info = {"collectionTimeBegin": "1000000", "clockMonotonicRaw": "0", "pid": "7"}
    (tmp_path / "host" / "start_info").write_text(json.dumps(start_info))
    calls = [(1, "aclnnMatmul", 100, 130), (2, "HcclAllReduce", 125, 160), (3, "aclrtMemcpyAsync", 170, 190)]
    lines = [f"{number},{name},5,{begin}000,{end}000\n" for number, name, begin, end in calls]
    (tmp_path / "host" / "data" / "calls.csv").write_text("".join(lines))
    tasks = {
        0: [(1, "aclnnMatmul", 0, 110, 130), (2, "HcclAllReduce", 1, 120, 160), (3, "aclrtMemcpyAsync", 0, 170, 190)],
        1: [(1, "aclnnMatmul", 0, 200, 240)],
    }
    for device, done in tasks.items():
        (tmp_path / f"device_{device}" / "data").mkdir(parents=True)
        lines = [f"{call},{name},{stream},{begin}000,{end}000\n" for call, name, stream, begin, end in done]
        (tmp_path / f"device_{device}" / "data" / "tasks.csv").write_text("".join(lines))
    return tmp_path


def exported(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, MSPROF, *arguments, f"--output={folder}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_every_number_of_a_known_recording(folder):
    assert exported(folder, "--export=on").returncode == 0
    output = folder / "mindstudio_profiler_output"
    (summary,), (timeline,) = output.glob("op_summary_*.csv"), output.glob("msprof_*.json")
    columns = "Device_id", "Op Name", "OP Type", "Task Type", "Task Start Time(us)", "Task Duration(us)"
    assert [tuple(row[name].strip() for name in columns) for row in rows(summary)] == [
        ("0", "aclnnMatmul", "Matmul", "HOST_CPU", "1000110.000", "20.0"),
        ("0", "hcom_allReduce__1", "hcom_allReduce_", "HCCL", "1000120.000", "40.0"),
        ("1", "aclnnMatmul", "Matmul", "HOST_CPU", "1000200.000", "40.0"),
    ]
    events = json.loads(timeline.read_text())
    lanes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [(lanes[event["pid"]], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [
        ("CANN", "AscendCL@aclnnMatmul", "1000100.000", 30.0),
        ("CANN", "AscendCL@HcclAllReduce", "1000125.000", 35.0),
        ("CANN", "AscendCL@aclrtMemcpyAsync", "1000170.000", 20.0),
        ("Ascend Hardware", "aclnnMatmul", "1000110.000", 20.0),
        ("Communication", "hcom_allReduce__1", "1000120.000", 40.0),
        ("Ascend Hardware", "aclrtMemcpyAsync", "1000170.000", 20.0),
        ("Overlap Analysis", "Computing", "1000110.000", 20.0),
        ("Overlap Analysis", "Communication", "1000120.000", 40.0),
        ("Overlap Analysis", "Communication(Not Overlapped)", "1000130.000", 30.0),
        ("Ascend Hardware", "aclnnMatmul", "1000200.000", 40.0),
        ("Overlap Analysis", "Computing", "1000200.000", 40.0),
    ]
    labels = {event["args"]["labels"] for event in events if event["name"] == "process_labels"}
    assert labels == {"CPU", "NPU 0", "NPU 1"}


def test_spans_are_joined_and_taken_from_each_other():
    tool = msprof()
    assert tool.union([(7, 8), (1, 3), (2, 5), (5, 6)]) == [(1, 6), (7, 8)] and tool.union([]) == []
    assert tool.without([(1, 8), (9, 12)], [(2, 3), (5, 10)]) == [(1, 2), (3, 5), (10, 12)]
    assert tool.without([(1, 8)], [(0, 9)]) == [] and tool.without([(1, 2)], []) == [(1, 2)]


def test_a_folder_without_a_recording_is_one_sentence(tmp_path):
    ended = exported(tmp_path, "--export=on")
    assert ended.returncode == 1 and ended.stderr.startswith(f"error: {tmp_path} does not contain a recording")
    assert len(ended.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())
    assert exported(tmp_path, "--export=on", "--type=db").returncode == 2


def test_torch_npu_is_told_that_there_is_no_database():
    """It asks whether the help of msprof has an option for it."""
    told = subprocess.run([sys.executable, MSPROF, "--help"], capture_output=True, text=True, timeout=600).stdout
    assert "--export" in told and "--type" not in told
