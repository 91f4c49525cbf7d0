"""The profiler records what ran, when and inside what, and leaves the files of Ascend PyTorch Profiler."""

import csv
import json
import os
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch_npu
from torch_npu import profiler
from torch_npu.profiler import ProfilerAction, trace
from torch_npu.profiler.trace import Kind, Recording


def work() -> None:
    x = torch.ones(4, 6, device="npu")
    (x @ x.t()).exp_()


def timeline(recorded: profiler.profile, tmp_path: Path) -> list[dict]:
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    return json.loads((tmp_path / "trace.json").read_text())


def names(entries: list[dict], category: str) -> Counter:
    return Counter(entry["name"] for entry in entries if entry.get("cat") == category and entry["ph"] == "X")


def rows(file: Path) -> list[dict]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_calls_and_kernels_are_in_the_timeline_and_nothing_else_is(tmp_path):
    work()
    with profiler.profile() as recorded:
        work()
    work()
    entries = timeline(recorded, tmp_path)
    assert names(entries, "kernel") == {"aten::fill_": 1, "aten::mm": 1, "aten::exp_": 1}
    assert names(entries, "cpu_op")["aten::matmul"] == 1 and names(entries, "cpu_op")["aten::exp_"] == 1


def test_a_kernel_computes_inside_its_call_and_an_arrow_connects_them(tmp_path):
    with profiler.profile() as recorded:
        torch.ones(200, 200, device="npu").exp_()
    entries = timeline(recorded, tmp_path)
    (call,) = [entry for entry in entries if entry["name"] == "aten::exp_" and entry["cat"] == "cpu_op"]
    (kernel,) = [entry for entry in entries if entry["name"] == "aten::exp_" and entry["cat"] == "kernel"]
    assert call["ts"] <= kernel["ts"] and kernel["ts"] + kernel["dur"] <= call["ts"] + call["dur"]
    arrows = [entry for entry in entries if entry.get("cat") == "async_npu" and entry["ts"] == kernel["ts"]]
    assert {(arrow["ph"], arrow["pid"], arrow["tid"]) for arrow in arrows} == {
        ("s", call["pid"], call["tid"]),
        ("f", kernel["pid"], 0),
    }
    assert len({arrow["id"] for arrow in arrows}) == 1


def test_operators_of_torch_npu_gradients_and_annotations_are_recorded(tmp_path):
    x = torch.randn(2, 8, device="npu", requires_grad=True)
    with profiler.profile() as recorded, torch.profiler.record_function("my part"):
        torch_npu.npu_swiglu(x).sum().backward()
    entries = timeline(recorded, tmp_path)
    assert names(entries, "kernel")["npu::npu_swiglu"] == 1 == names(entries, "kernel")["npu::npu_swiglu_backward"]
    assert names(entries, "cpu_op")["npu::npu_swiglu"] == 1
    assert any("Backward" in name for name in names(entries, "cpu_op"))
    assert names(entries, "user_annotation") == {"my part": 1, "ProfilerStep#0": 1}


def test_other_threads_and_dies_have_lanes_of_their_own(tmp_path):
    with profiler.profile() as recorded:
        work()
        thread = threading.Thread(target=lambda: torch.ones(1, device="npu:1"))
        thread.start()
        thread.join()
    entries = timeline(recorded, tmp_path)
    fills = [entry for entry in entries if entry["name"] == "aten::fill_"]
    assert len({entry["pid"] for entry in fills if entry["cat"] == "kernel"}) == 2
    assert len({entry["tid"] for entry in fills if entry["cat"] == "cpu_op"}) == 2


@pytest.mark.parametrize("activity", sorted(profiler.supported_activities(), key=str))
def test_only_the_activities_asked_for_are_recorded(tmp_path, activity):
    with profiler.profile(activities=[activity]) as recorded:
        work()
    found = {entry["cat"] for entry in timeline(recorded, tmp_path) if entry["ph"] == "X"}
    assert found == {"user_annotation", {"CPU": "cpu_op", "NPU": "kernel"}[activity.name]}


def test_a_schedule_says_which_steps_are_recorded():
    plan = profiler.schedule(skip_first=1, wait=1, warmup=1, active=2, repeat=2)
    expected = "NONE NONE WARMUP RECORD RECORD_AND_SAVE NONE WARMUP RECORD RECORD_AND_SAVE NONE NONE"
    assert [plan(step).name for step in range(11)] == expected.split()
    endless = profiler.schedule(wait=0, active=1)
    assert {endless(step) for step in range(100)} == {ProfilerAction.RECORD_AND_SAVE}
    with pytest.raises(ValueError, match="active must be positive"):
        profiler.schedule(wait=0, active=0)


def test_each_cycle_is_saved_with_its_steps_only():
    saved = []

    def keep(profile):
        saved.append(([step.number for step in profile.recording.steps], len(profile.recording.on_device())))

    with profiler.profile(schedule=profiler.schedule(wait=1, active=2, repeat=2), on_trace_ready=keep) as recorded:
        for _ in range(8):
            work()
            recorded.step()
    assert saved == [([1, 2], 6), ([4, 5], 6)]


def test_the_handler_leaves_the_documented_files(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    handler = profiler.tensorboard_trace_handler(str(tmp_path), worker_name="worker")
    with profiler.profile(on_trace_ready=handler, record_shapes=True) as recorded:
        recorded.add_metadata("model", "tiny")
        work()
        recorded.step()
        work()
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("worker_") and folder.name.endswith("_ascend_pt")
    assert json.loads((folder / "profiler_metadata.json").read_text()) == {"model": "tiny"}
    assert json.loads((folder / "profiler_info_3.json").read_text()) == {
        "rank_id": 3, "emulated": True, "process": os.getpid(),
    }  # fmt: skip
    output = folder / "ASCEND_PROFILER_OUTPUT"
    assert names(json.loads((output / "trace_view.json").read_text()), "kernel")["aten::mm"] == 2
    kernels = rows(output / "kernel_details.csv")
    assert Counter(row["Name"] for row in kernels) == {"aten::fill_": 2, "aten::mm": 2, "aten::exp_": 2}
    assert [row["Step Id"] for row in kernels] == ["0"] * 3 + ["1"] * 3
    statistic = {row["OP Type"]: row for row in rows(output / "op_statistic.csv")}
    assert statistic["mm"]["Count"] == "2"
    assert sum(float(row["Ratio(%)"]) for row in statistic.values()) == pytest.approx(100, abs=0.01)
    operators = {row["Name"]: row for row in rows(output / "operator_details.csv")}
    assert operators["aten::mm"]["Input Shapes"] == "4,6;6,4"
    outer, inner = operators["aten::matmul"], operators["aten::mm"]
    assert float(outer["Host Self Duration(us)"]) < float(outer["Host Total Duration(us)"])
    assert float(outer["Device Total Duration(us)"]) >= float(inner["Device Self Duration(us)"]) > 0
    assert float(outer["Device Self Duration(us)"]) == 0
    steps = rows(output / "step_trace_time.csv")
    assert [row["Step"] for row in steps] == ["0", "1"] and float(steps[0]["Computing"]) > 0


def test_nothing_is_recorded_unless_somebody_profiles(tmp_path):
    recorded = profiler.profile(schedule=lambda step: ProfilerAction.NONE)
    recorded.start()
    work()
    recorded.stop()
    with pytest.raises(RuntimeError, match="must be stopped"):
        recorded.export_chrome_trace(str(tmp_path / "trace.json"))


def test_two_profilers_at_once_are_refused():
    with profiler.profile():
        with pytest.raises(RuntimeError, match="recording already"):
            profiler.profile().start()
    with profiler.profile() as recorded:
        work()
    assert recorded.recording.on_device()


def test_options_that_add_nothing_are_named():
    with pytest.warns(UserWarning, match="adds nothing to the trace: profile_memory, with_stack, ExportType.Db"):
        profiler.profile(
            profile_memory=True,
            with_stack=True,
            experimental_config=profiler._ExperimentalConfig(export_type=profiler.ExportType.Db),
        )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("Db", True), ("Text", False), (["Db"], True), (["Text", "Db"], True), (["Text"], False), (None, False)],
)
def test_a_form_of_export_is_one_or_several(asked, expected):
    forms = [getattr(profiler.ExportType, name) for name in ([asked] if isinstance(asked, str) else asked or [])]
    options = {} if asked is None else {"export_type": forms[0] if isinstance(asked, str) else forms}
    assert profiler._ExperimentalConfig(**options).exports_database is expected


def test_the_way_vllm_ascend_asks_for_a_profile(tmp_path):
    """The call of its worker: explicit configuration, start and stop from outside."""
    configuration = profiler._ExperimentalConfig(
        export_type=profiler.ExportType.Text,
        profiler_level=profiler.ProfilerLevel.Level1,
        msprof_tx=False,
        aic_metrics=profiler.AiCMetrics.AiCoreNone,
        l2_cache=False,
        op_attr=False,
        data_simplification=False,
        record_op_args=False,
        gc_detect_threshold=None,
    )
    recorded = profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        with_stack=False,
        profile_memory=False,
        with_modules=False,
        experimental_config=configuration,
        on_trace_ready=profiler.tensorboard_trace_handler(str(tmp_path)),
    )
    recorded.start()
    work()
    recorded.stop()
    (trace,) = tmp_path.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json")
    assert names(json.loads(trace.read_text()), "kernel")["aten::mm"] == 1


def known_recording() -> Recording:
    """Times in microseconds: two steps, a call within a call, kernels of both on two dies, and a collective."""

    def event(kind, name, start, duration, device=-1, shapes=()):
        return SimpleNamespace(kind=kind, name=name, start=1000 * start, duration=1000 * duration, thread=1,
                               device=device, shapes=[list(shape) for shape in shapes])  # fmt: skip

    events = [
        event(Kind.ANNOTATION, "ProfilerStep#4", 100, 100),
        event(Kind.OPERATOR, "aten::linear", 110, 50, shapes=[(4, 6), (6,)]),
        event(Kind.KERNEL, "aten::t", 112, 2, device=0),
        event(Kind.OPERATOR, "aten::mm", 120, 30, shapes=[(4, 6)]),
        event(Kind.KERNEL, "aten::mm", 130, 10, device=0),
        event(Kind.ANNOTATION, "ProfilerStep#5", 200, 100),
        event(Kind.KERNEL, "aten::mm", 210, 20, device=0),
        event(Kind.KERNEL, "aten::mm", 220, 4, device=1),
        event(Kind.COLLECTIVE, "hccl::all_reduce", 240, 28, device=0),
    ]
    return Recording(events, profiler.supported_activities(), {})


def test_every_number_of_the_tables_of_a_known_recording():
    recording = known_recording()

    def columns(table, *names):
        return [tuple(row[name] for name in names) for row in table(recording)]

    assert columns(trace.kernel_details, "Step Id", "Device_id", "Name", "Type", "Accelerator Core", "Start Time(us)",
                   "Duration(us)") == [
        (4, 0, "aten::t", "t", "HOST_CPU", "112.000", "2.000"),
        (4, 0, "aten::mm", "mm", "HOST_CPU", "130.000", "10.000"),
        (5, 0, "aten::mm", "mm", "HOST_CPU", "210.000", "20.000"),
        (5, 1, "aten::mm", "mm", "HOST_CPU", "220.000", "4.000"),
        (5, 0, "hccl::all_reduce", "all_reduce", "HCCL", "240.000", "28.000"),
    ]  # fmt: skip
    assert columns(trace.op_statistic, "Device_id", "OP Type", "Count", "Total Time(us)", "Min Time(us)",
                   "Avg Time(us)", "Max Time(us)", "Ratio(%)") == [
        (0, "mm", 2, "30.000", "10.000", "15.000", "20.000", "46.875"),
        (0, "all_reduce", 1, "28.000", "28.000", "28.000", "28.000", "43.750"),
        (1, "mm", 1, "4.000", "4.000", "4.000", "4.000", "6.250"),
        (0, "t", 1, "2.000", "2.000", "2.000", "2.000", "3.125"),
    ]  # fmt: skip
    durations = (f"{kind} Duration(us)" for kind in ("Host Self", "Host Total", "Device Self", "Device Total"))
    assert columns(trace.operator_details, "Name", "Input Shapes", *durations) == [
        ("aten::linear", "4,6;6", "20.000", "50.000", "2.000", "12.000"),
        ("aten::mm", "4,6", "30.000", "30.000", "10.000", "10.000"),
    ]
    assert columns(trace.step_trace_time, "Device_id", "Step", "Computing", "Communication(Not Overlapped)",
                   "Overlapped", "Communication", "Free") == [
        (0, 4, "12.000", "0.000", "0.000", "0.000", "88.000"),
        (0, 5, "20.000", "28.000", "0.000", "28.000", "52.000"),
        (1, 4, "0.000", "0.000", "0.000", "0.000", "100.000"),
        (1, 5, "4.000", "0.000", "0.000", "0.000", "96.000"),
    ]  # fmt: skip
