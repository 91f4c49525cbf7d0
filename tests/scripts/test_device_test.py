"""The device's self-test passes on the emulator, finds every injected fault, and reports a die that hangs or ends."""

from __future__ import annotations

import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
import torch_npu  # noqa: F401

from post_training import claimed_dies
from scripts import doctor, preflight
from scripts.health_checks import device_checks, device_test
from scripts.health_checks.device_checks import BAD, LEFT_OUT, OK, finite_check, large_tensors, nan_in_maxima
from scripts.health_checks.finding import Finding

PLANTED = (sys.executable, "-m", "tests.scripts.planted_device")
ELEMENTS = 200_003
# The emulator's streams run late, in any order that events allow.
SEED = "7"


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.what for finding in findings}) == len(findings)
    return {finding.what: finding for finding in findings}


def examined(*program: str, check_s: float = 200) -> dict[str, Finding]:
    return by_name(device_test.check_device(program, start_s=200, check_s=check_s))


def test_emulated_dies_pass(monkeypatch):
    monkeypatch.setenv("NPU_EMULATOR_STREAM_SEED", SEED)
    found = examined(*device_test.PROGRAM)
    assert {name: finding.state for name, finding in found.items()} == {
        "NaN in maxima": "ok", "non-finite check": "ok", "large tensors": "?", "event order": "ok",
        "empty all-to-all": "ok",
    }  # fmt: skip
    assert found["large tensors"].detail == "not run: an emulated die keeps its memory on this host"
    assert found["empty all-to-all"].detail == "between 2 dies, with empty parts"


def test_dies_that_a_job_has_are_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(claimed_dies, "devices_of_dies", lambda root: [tmp_path / "davinci0", tmp_path / "davinci1"])
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device_test, "_begin", lambda *_: pytest.fail("no child is started"))
    with claimed_dies.claimed_dies(1, {"ASCEND_RT_VISIBLE_DEVICES": "1"}):
        (found,) = device_test.check_device()
    assert found.state == "?" and re.fullmatch(r"not run: process \d+ of \w+ has die 1 \(.*davinci1\)", found.detail)


def test_events_and_splits_that_do_nothing_are_found(monkeypatch):
    monkeypatch.setenv("NPU_EMULATOR_STREAM_SEED", SEED)
    found = examined(*PLANTED, "without_events_and_splits")
    assert "elements were read before their event" in found["event order"].detail
    assert "weights would be read while they are written" in found["event order"].remedy
    exchange = found["empty all-to-all"]
    assert re.match(r"rank [01] received \[.+\], but must have \[", exchange.detail)
    assert "would mix their parts" in exchange.remedy
    assert not found["NaN in maxima"].remedy


def test_hanging_die_is_named_with_what_it_does():
    found = examined(*PLANTED, "hanging", check_s=4)
    assert found.keys() == {"die 0"}, "die 1 waits for it"
    assert found["die 0"].detail == "no answer within 4 s: NaN in maxima" and "reset it" in found["die 0"].remedy


def test_die_that_ends_the_process_is_named():
    found = examined(*PLANTED, "ending", check_s=4)
    assert found["die 0"].detail.startswith(f"NaN in maxima ended by signal {int(signal.SIGSEGV)}")


def test_die_that_cannot_be_opened_is_named_with_its_error():
    found = examined(*PLANTED, "closed")
    assert found.keys() == {"die 0", "die 1"}
    assert "start ended with 1: RuntimeError: aclrtSetDevice of die 0 failed" in found["die 0"].detail
    assert "set_env.sh" in found["die 0"].remedy


def test_rank_that_ends_is_named_with_its_exception(tmp_path):
    """torch_npu prints a line about an unknown error after it."""
    (tmp_path / "errors").write_text(
        "RuntimeError: no free memory\n[ERROR] 2026-11-30-04:07:44 (PID:12) ERR99999 UNKNOWN applicaiton exception\n"
    )
    process = SimpleNamespace(poll=lambda: 1)
    rank = SimpleNamespace(number=3, process=process, running=lambda: "NaN in maxima", errors=tmp_path / "errors")
    assert device_test._ended(rank).detail == "NaN in maxima ended with 1: RuntimeError: no free memory"


def replaced(monkeypatch, name, instead):
    """Route every call of a tensor's method through `instead`, which gets the original as its first argument."""
    upstream = getattr(torch.Tensor, name)
    monkeypatch.setattr(torch.Tensor, name, lambda *given, **named: instead(upstream, *given, **named))


@pytest.mark.parametrize("name", ["max", "min", "amax", "amin"])
def test_maxima_that_drop_nan_are_found(monkeypatch, name):
    assert nan_in_maxima()[0] == OK
    replaced(monkeypatch, name, lambda upstream, tensor, **named: upstream(tensor.nan_to_num(0.0), **named))
    state, said = nan_in_maxima()
    assert state == BAD and said.startswith(f"{name}(") and "with NaN at 0 is 0.0" in said


@pytest.mark.parametrize("blind", ["nan", "inf", "-inf"])
def test_isfinite_that_passes_a_value_is_found(monkeypatch, blind):
    assert finite_check()[0] == OK
    value, upstream = float(blind), torch.isfinite
    passes = torch.isnan if value != value else lambda tensor: tensor == value
    monkeypatch.setattr(torch, "isfinite", lambda tensor: upstream(tensor) | passes(tensor))
    state, said = finite_check()
    assert state == BAD and said.endswith(f"elements of torch.float32 with {blind} at 0 count as finite")


def test_isfinite_that_rejects_large_values_is_found(monkeypatch):
    monkeypatch.setattr(torch, "isfinite", lambda tensor: tensor.abs() < 1e38)
    assert finite_check()[0] == BAD and "count as not finite" in finite_check()[1]


COUNTED = 2**17
"""The number of elements after which the faulty kernels of these tests stop."""


def half_zeroed(upstream, tensor):
    upstream(tensor[:COUNTED])
    return tensor


def half_copied(upstream, tensor, source, *given, **named):
    upstream(tensor[:COUNTED], source[:COUNTED], *given, **named)
    return tensor


@pytest.mark.parametrize(
    ("name", "fault", "said"),
    [
        ("zero_", half_zeroed, "after zero_() of"),
        ("copy_", half_copied, "after copy_() of"),
        ("sum", lambda upstream, tensor, **named: upstream(tensor[:COUNTED], **named), "the sum of"),
    ],
)
def test_kernels_that_count_too_little_are_found(monkeypatch, name, fault, said):
    """Fewer elements are used here: COUNTED stands for the 2**31 after which a device's kernel may be wrong."""
    assert large_tensors(ELEMENTS) == (OK, f"fills and copies of {ELEMENTS} elements are complete, and so are sums")
    replaced(monkeypatch, name, lambda upstream, tensor, *given, **named: (
        fault(upstream, tensor, *given, **named) if tensor.numel() == ELEMENTS else upstream(tensor, *given, **named)
    ))  # fmt: skip
    state, found = large_tensors(ELEMENTS)
    assert state == BAD and found.startswith(f"{said} {ELEMENTS} elements")


def test_small_die_leaves_large_tensors_out(monkeypatch):
    monkeypatch.setattr(device_checks, "_emulated", lambda: False)
    monkeypatch.setattr(torch.npu, "mem_get_info", lambda: (6_000_000_000, 64_000_000_000))
    assert large_tensors(None) == (LEFT_OUT, "6.4 GB are needed, but 6.0 GB are free")
    monkeypatch.setattr(torch.npu, "mem_get_info", lambda: (9 * ELEMENTS, 1))
    assert large_tensors(ELEMENTS)[0] == OK and large_tensors(ELEMENTS)[1].endswith("more and are skipped")


def test_single_die_leaves_all_to_all_out(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.npu, "device_count", lambda: 1)
    assert device_checks.empty_all_to_all(0, tmp_path) == (LEFT_OUT, "it needs 2 dies, but there is 1")


def test_host_without_torch_npu_says_so(monkeypatch):
    monkeypatch.setattr(device_test.importlib.util, "find_spec", lambda name: None)
    assert [each.line() for each in device_test.check_device()] == [
        "?   device self-test      not run: torch_npu is not installed"
    ]
    assert preflight._device() == (preflight.LEFT_OUT, "not run: torch_npu is not installed")


BAD_DIE = Finding("event order", "7 elements were read too early", "weights would be read while they are written")


@pytest.mark.parametrize(("options", "code"), [((), 1), (("--no-self-test",), 0)])
def test_doctor_reports_self_test(monkeypatch, capsys, options, code):
    monkeypatch.setattr(doctor, "read_settings", lambda path: {})
    monkeypatch.setattr(doctor, "check_node", lambda settings, job_runs, stack: [Finding("python", "3.11")])
    monkeypatch.setattr(doctor, "check_device", lambda: [BAD_DIE])
    assert doctor.main(["--cluster", os.devnull, *options]) == code
    assert (BAD_DIE.line() in capsys.readouterr().out) is bool(code)


def test_preflight_fails_on_a_bad_die_alone(monkeypatch):
    well = Finding("NaN in maxima", "fine")
    monkeypatch.setattr(preflight, "check_device", lambda: [well, BAD_DIE])
    assert preflight._device() == (preflight.FAILED, BAD_DIE.line())
    monkeypatch.setattr(preflight, "check_device", lambda: [well])
    assert preflight._device() == (preflight.PASSED, well.line())


def test_preflight_tests_dies_once(monkeypatch):
    """The node stage asks the doctor, which would otherwise test them again."""
    asked = []
    monkeypatch.setattr(preflight.doctor, "main", lambda arguments: asked.append(arguments) or 0)
    preflight._node(SimpleNamespace(cluster="file", stack="2026"))
    assert asked == [["--cluster", "file", "--no-self-test", "--stack", "2026"]]
