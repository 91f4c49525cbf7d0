"""Meters count what the device did, by phase, and write it where they are told."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import torch_npu

from npu_emulator import meters


@pytest.fixture(autouse=True)
def fresh_phases():
    meters.reset_phases()
    yield
    meters.reset_phases()


def counted(name: str) -> dict:
    return meters.snapshot()["phases"][name]


def test_operators_are_counted_by_name_and_only_inside():
    matrix = torch.ones(2, 2, device="npu")
    matrix @ matrix
    with meters.phase("product"):
        for _ in range(3):
            matrix @ matrix
        torch_npu.npu_swiglu(matrix)
    matrix @ matrix
    assert counted("product")["operators"] == {"aten::mm": {"calls": 3}, "npu::npu_swiglu": {"calls": 1}}


def test_backwards_of_operators_are_counted_on_their_own():
    x = torch.ones(2, 2, device="npu", requires_grad=True)
    with meters.phase("training"):
        torch_npu.npu_swiglu(x).sum().backward()
    operators = counted("training")["operators"]
    assert operators["npu::npu_swiglu"]["calls"] == operators["npu::npu_swiglu_backward"]["calls"] == 1


def test_copies_are_counted_by_direction():
    host = torch.ones(10)
    with meters.phase("copies"):
        device = host.to("npu")
        device.cpu()
        device.clone()
        device.to("npu:1")
        device[0].item()
    copies = counted("copies")["copies"]
    assert copies["host_to_device"] == {"count": 1, "bytes": 40}
    assert copies["device_to_host"] == {"count": 2, "bytes": 44}
    assert copies["device_to_device"] in ({"count": 1, "bytes": 40}, {"count": 2, "bytes": 80})
    assert copies["transposing_on_device"] == {"count": 0, "bytes": 0}


def test_copies_that_transpose_are_counted_by_themselves():
    matrix, cube = torch.ones(6, 10, device="npu"), torch.ones(2, 3, 4, device="npu")
    straight = [matrix[1:], matrix[:, 2:5], matrix.t().t(), cube[1, :, 2:], matrix[3:4].t(), matrix[:1, :1]]
    crossing = [matrix.t(), matrix.t()[2:3], cube.transpose(1, 2), matrix[:, ::2]]
    for name, sources in (("straight", straight), ("crossing", crossing)):
        targets = [torch.empty(source.shape, device="npu") for source in sources]
        with meters.phase(name):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
    assert counted("straight")["copies"]["transposing_on_device"] == {"count": 0, "bytes": 0}
    found = sum(source.numel() for source in crossing) * 4
    assert counted("crossing")["copies"]["transposing_on_device"] == {"count": len(crossing), "bytes": found}


def test_host_work_is_not_counted():
    with meters.phase("host"):
        torch.ones(4) + torch.ones(4).clone()
    assert counted("host")["operators"] == {} and counted("host")["copies"]["device_to_device"]["count"] == 0


def test_a_phase_has_a_peak_of_its_own():
    outside = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    with meters.phase("outer"):
        first = torch.empty(2 << 20, dtype=torch.uint8, device="npu")
        with meters.phase("inner"):
            second = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
            del second
        del first
    with meters.phase("later"):
        kept = torch.empty(512, dtype=torch.uint8, device="npu")
    assert counted("inner")["peak_bytes"]["0"] == counted("outer")["peak_bytes"]["0"] == before + (3 << 20)
    assert counted("later")["peak_bytes"]["0"] == counted("later")["allocated_bytes"]["0"] == before + 512
    assert torch.npu.max_memory_allocated() == before + (3 << 20) and outside.numel() and kept.numel()


def test_a_phase_is_summed_over_its_entries_even_when_it_fails():
    for fails in (False, True, False):
        try:
            with meters.phase("repeated"):
                torch.ones(1, device="npu").add_(1)
                if fails:
                    raise ValueError
        except ValueError:
            pass
    assert counted("repeated")["entered"] == 3 and counted("repeated")["operators"]["aten::add_.Tensor"]["calls"] == 3


def test_a_snapshot_is_written_as_a_whole(tmp_path):
    torch.ones(1, device="npu")
    assert meters.write() is None or os.environ.get("NPU_EMULATOR_METERS")
    written = meters.write(str(tmp_path / "new"))
    assert written == tmp_path / "new" / f"{os.getpid()}.json"
    found = json.loads(written.read_text())
    assert found["pid"] == os.getpid() and found["memory"]["0"]["capacity"] > 0
    assert list(written.parent.iterdir()) == [written]


# What each engine calls an addition.
ADDITIONS = {"stand-in": "aten::add.Tensor", "cann": "aclnnAdds"}

PROGRAM = """
import sys, torch, torch_npu
if "use" in sys.argv:
    torch.ones(3, device="npu") + 1
if "wait" in sys.argv:
    from npu_emulator import meters
    torch.npu.synchronize()
    meters.write()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=ADDITIONS)
def engine(request):
    return request.param


def run(engine, folder, *words, **options):
    environment = os.environ | {"NPU_EMULATOR_METERS": str(folder), "NPU_EMULATOR_ENGINE": engine}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=environment, text=True, **options)


def test_processes_that_used_the_device_write_at_exit(tmp_path, engine):
    used, unused = run(engine, tmp_path, "use"), run(engine, tmp_path)
    assert used.wait() == unused.wait() == 0
    (written,) = tmp_path.iterdir()
    assert written.name == f"{used.pid}.json"
    assert json.loads(written.read_text())["operators"][ADDITIONS[engine]]["calls"] == 1


def test_a_killed_process_leaves_what_it_wrote(tmp_path, engine):
    process = run(engine, tmp_path, "use", "wait", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text())["operators"][ADDITIONS[engine]]["calls"] == 1
