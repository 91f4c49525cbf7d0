"""Meters count the device's work by phase and write it to the given place."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch_npu

from npu_emulator import meters
from post_training.processes.descendants import wait_until


@pytest.fixture(autouse=True)
def fresh_phases():
    meters.reset_phases()
    yield
    meters.reset_phases()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase that waits until the device has done its work."""
    torch.npu.synchronize()
    with meters.phase(name):
        try:
            yield
        finally:
            torch.npu.synchronize()


def counted(name: str) -> dict:
    return meters.snapshot()["phases"][name]


def test_operators_are_counted_by_name_and_only_inside():
    matrix = torch.ones(2, 2, device="npu")
    matrix @ matrix
    with phase("product"):
        for _ in range(3):
            matrix @ matrix
        torch_npu.npu_swiglu(matrix)
    matrix @ matrix
    assert counted("product")["operators"] == {"aclnnMatmul": {"calls": 3}, "aclnnSwiGlu": {"calls": 1}}


def test_backwards_of_operators_are_counted_on_their_own():
    x = torch.ones(2, 2, device="npu", requires_grad=True)
    with phase("training"):
        torch_npu.npu_swiglu(x).sum().backward()
    operators = counted("training")["operators"]
    assert operators["aclnnSwiGlu"]["calls"] == operators["aclnnSwiGluGrad"]["calls"] == 1


def test_copies_are_counted_by_direction():
    host = torch.ones(10)
    with phase("copies"):
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
        with phase(name):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
    assert counted("straight")["copies"]["transposing_on_device"] == {"count": 0, "bytes": 0}
    found = sum(source.numel() for source in crossing) * 4
    assert counted("crossing")["copies"]["transposing_on_device"] == {"count": len(crossing), "bytes": found}


def test_host_work_is_not_counted():
    with phase("host"):
        torch.ones(4) + torch.ones(4).clone()
    assert counted("host")["operators"] == {} and counted("host")["copies"]["device_to_device"]["count"] == 0


def test_a_phase_is_summed_over_its_entries_even_when_it_fails():
    for fails in (False, True, False):
        try:
            with phase("repeated"):
                torch.ones(1, device="npu").add_(1)
                if fails:
                    raise ValueError
        except ValueError:
            pass
    assert counted("repeated")["entered"] == 3 and counted("repeated")["operators"]["aclnnInplaceAdds"]["calls"] == 3


def test_a_snapshot_is_written_as_a_whole(tmp_path):
    torch.ones(1, device="npu")
    assert meters.write() is None or os.environ.get("NPU_EMULATOR_METERS")
    written = meters.write(str(tmp_path / "new"))
    assert written == tmp_path / "new" / f"{os.getpid()}.json"
    found = json.loads(written.read_text())
    assert found["pid"] == os.getpid() and found["memory"]["0"]["capacity"] > 0
    assert list(written.parent.iterdir()) == [written]


PROGRAM = """
import sys, torch, torch_npu
if "use" in sys.argv:
    torch.ones(3, device="npu") + 1
if "wait" in sys.argv:
    torch.npu.synchronize()
    sys.stdin.read()
"""


def run(folder, *words, **options):
    environment = os.environ | {"NPU_EMULATOR_METERS": str(folder)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=environment, text=True, **options)


def test_processes_that_used_the_device_write_at_exit(tmp_path):
    used, unused = run(tmp_path, "use"), run(tmp_path)
    assert used.wait() == unused.wait() == 0
    (written,) = tmp_path.iterdir()
    assert written.name == f"{used.pid}.json"
    assert json.loads(written.read_text())["operators"]["aclnnAdds"]["calls"] == 1


def test_killed_process_leaves_its_output(tmp_path):
    """It writes within a second; a machine with other work may take longer."""
    process = run(tmp_path, "use", "wait", stdin=subprocess.PIPE)
    written = tmp_path / f"{process.pid}.json"
    assert wait_until(lambda: written.exists() and "aclnnAdds" in json.loads(written.read_text())["operators"], 60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    assert json.loads(written.read_text())["operators"]["aclnnAdds"]["calls"] == 1
    assert list(tmp_path.iterdir()) == [written]


def taken() -> int:
    """Return the MiB of die 0 that this process holds."""
    return meters.snapshot()["memory"]["0"]["allocated"] >> 20


@pytest.mark.parametrize("seed", range(6))
def test_phases_within_others_leave_their_peaks(seed):
    """Memory comes and goes in nested phases; the peaks of the outer ones include it."""
    draw, held, peaks, opened = random.Random(seed), [], {}, []
    torch.npu.synchronize()
    with contextlib.ExitStack() as phases:
        for number in range(12):
            torch.npu.empty_cache()
            action = draw.choice(["take", "take", "give", "begin", "begin", "end"])
            if action == "take":  # torch_npu asks for whole blocks of 2 MiB, and for 32 bytes more than a tensor has
                held.append(torch.empty((draw.choice([31, 47, 63]) << 20), dtype=torch.uint8, device="npu"))
            elif action == "give" and held:
                held.pop(draw.randrange(len(held)))
                torch.npu.empty_cache()
            elif action == "begin":
                opened.append((f"phase {number}", phases.enter_context(contextlib.ExitStack())))
                opened[-1][1].enter_context(meters.phase(opened[-1][0]))
                peaks[opened[-1][0]] = 0
            elif action == "end" and opened:
                opened.pop()[1].close()
            for name, _ in opened:
                peaks[name] = max(peaks[name], taken())
    found = {name: each["peak_bytes"].get("0", 0) >> 20 for name, each in meters.snapshot()["phases"].items()}
    held.clear()
    torch.npu.empty_cache()
    assert len(found) > 1 and found == peaks
