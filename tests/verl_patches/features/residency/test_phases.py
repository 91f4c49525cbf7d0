import pytest
import torch
import torch_npu  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.features.measure import step_record
from verl_patches.features.residency.phases import GROUPS, NEEDED, Residency


@pytest.fixture(autouse=True)
def empty_record(monkeypatch):
    monkeypatch.setattr(step_record, "_record", step_record.StepRecord())


class Recorded:
    """A resident that writes down what it is told."""

    def __init__(self, name, log):
        self.name, self.log, self.present = name, log, True

    def onload(self):
        if not self.present:
            self.log.append(f"+{self.name}")
        self.present = True

    def offload(self):
        if self.present:
            self.log.append(f"-{self.name}")
        self.present = False


def full(enabled=True):
    log = []
    residency = Residency(lambda: enabled)
    residents = {name: Recorded(name, log) for name in sorted(GROUPS)}
    for name, resident in residents.items():
        residency.register(name, resident)
    return residency, residents, log


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(sorted(NEEDED)), min_size=1, max_size=8))
def test_after_entering_a_phase_exactly_what_it_needs_is_there(phases):
    residency, residents, _ = full()
    for phase in phases:
        residency.enter(phase)
        assert {name for name, resident in residents.items() if resident.present} == NEEDED[phase]


def test_the_kv_cache_is_created_after_training_state_has_left():
    residency, _, log = full()
    for phase in ("idle", "reshard"):
        residency.enter(phase)
    log.clear()
    residency.enter("rollout")
    assert log.index("-actor_params") < log.index("+kv_cache")


def test_what_both_phases_need_does_not_move():
    residency, _, log = full()
    residency.enter("update")
    log.clear()
    residency.enter("reshard")
    assert "-actor_params" not in log and "+actor_params" not in log


def test_switched_off_everything_stays():
    residency, residents, log = full(enabled=False)
    for phase in NEEDED:
        residency.enter(phase)
    assert not log and all(resident.present for resident in residents.values())


def test_switching_off_brings_everything_back():
    switch = [True]
    residency = Residency(lambda: switch[0])
    resident = Recorded("kv_cache", [])
    residency.register("kv_cache", resident)
    residency.enter("update")
    assert not resident.present
    switch[0] = False
    residency.enter("update")
    assert resident.present


def test_unknown_names_are_refused():
    residency = Residency(lambda: True)
    with pytest.raises(ValueError, match="no phase needs a group 'gradients'; groups are actor_grads"):
        residency.register("gradients", Recorded("gradients", []))
    with pytest.raises(ValueError, match="unknown phase 'train'; phases are reshard"):
        residency.enter("train")


def test_memory_is_recorded_under_the_phase_that_used_it():
    residency = Residency(lambda: True)
    residency.enter("update")
    used = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
    held = torch.npu.memory_allocated()
    del used
    residency.enter("idle")
    residency.close()
    record = step_record.current_record()
    assert record.peak_bytes["update"] >= held
    assert record.allocated_bytes["update"] <= held - (1 << 20)
    assert record.peak_bytes["idle"] <= held - (1 << 20)
    assert record.seconds["offload"] > 0
