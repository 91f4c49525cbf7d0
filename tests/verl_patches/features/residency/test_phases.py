import pytest
import torch
import torch_npu  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from post_training.process_context import process_context
from verl_patches.features.measure import step_record
from verl_patches.features.residency import phases
from verl_patches.features.residency.phases import GROUPS, PHASES, Phase, Residency
from verl_patches.features.residency.storages import StorageGroup

# Each test starts with an empty step record.
pytestmark = pytest.mark.usefixtures("own_context")


class Recorded:
    """A resident that logs its calls."""

    unmapped_bytes = 0

    def __init__(self, name, log):
        self.name, self.log, self.present = name, log, True

    def onload(self):
        if self.present:
            return 0
        self.log.append(f"+{self.name}")
        self.present = True
        return 3

    def offload(self, changed=True):
        if not self.present:
            return 0
        self.changed = changed
        self.log.append(f"-{self.name}")
        self.present = False
        return 5


def full(enabled=True):
    log = []
    residency = Residency(lambda: enabled)
    residents = {name: Recorded(name, log) for name in sorted(GROUPS, reverse=True)}
    for name, resident in residents.items():
        residency.register(name, resident)
    return residency, residents, log


STEP = ("reshard", "rollout", "idle", "old_log_prob", "ref", "values", "update_critic", "update")


def test_when_generation_is_over_the_cache_leaves_and_nothing_else_does():
    residency, _, log = full()
    for phase in ("reshard", "rollout"):
        residency.enter(phase)
    log.clear()
    residency.enter("idle")
    assert log == ["-kv_cache"]


# Rollout always follows reshard, so the two are drawn together.
SEQUENCES = st.lists(st.sampled_from([*sorted(set(PHASES) - {"rollout"}), "reshard rollout"]), min_size=1, max_size=8)


@settings(max_examples=100)
@given(SEQUENCES)
def test_a_phase_has_what_it_needs_and_nothing_leaves_that_it_needs(sequence):
    residency, residents, log = full()
    for phase in " ".join(sequence).split():
        before = {name for name, resident in residents.items() if resident.present}
        log.clear()
        residency.enter(phase)
        present = {name for name, resident in residents.items() if resident.present}
        needs, keeps = PHASES[phase].needs, PHASES[phase].keeps
        assert present == needs | (before & keeps)
        assert log == [f"-{name}" for name in GROUPS if name in before - present] + [
            f"+{name}" for name in GROUPS if name in present - before
        ]


def test_the_kv_cache_comes_last_after_training_state_has_left():
    residency, _, log = full()
    for phase in ("init", "reshard"):
        residency.enter(phase)
    log.clear()
    residency.enter("rollout")
    assert log == ["-actor_params", "+kv_cache"]


def test_another_generation_moves_no_weights():
    residency, _, log = full()
    for phase in ("reshard", "rollout", "idle"):
        residency.enter(phase)
    log.clear()
    for phase in ("reshard", "rollout"):
        residency.enter(phase)
    assert not [move for move in log if "rollout_weights" in move]


def test_a_whole_step_moves_every_group_once_each_way_but_the_weights_that_both_ends_need():
    residency, _, log = full()
    for phase in ("init", *STEP):
        residency.enter(phase)
    log.clear()
    for phase in STEP:
        residency.enter(phase)
    moves = {name: (log.count(f"+{name}"), log.count(f"-{name}")) for name in GROUPS}
    # Training weights make room for the generation and for the reference, and return after each.
    assert moves == dict.fromkeys(GROUPS, (1, 1)) | {"actor_params": (2, 2)}


def test_the_reference_policy_has_the_device_to_itself():
    residency, _, log = full()
    for phase in ("init", *STEP[: STEP.index("ref")]):
        residency.enter(phase)
    log.clear()
    residency.enter("ref")
    assert log == ["-actor_params", "+ref_params"]


def bytes_copied_out(group, sequence):
    """Enter `sequence` with a tensor of 1000 bytes as `group`. Return the non-zero bytes that phases copied out."""
    residency = Residency(lambda: True)
    tensor = torch.ones(1000, dtype=torch.uint8, device="npu")
    residency.register(group, StorageGroup(lambda: [tensor]))
    found = []
    for phase in sequence:
        record = process_context().keep(step_record.StepRecord())
        residency.enter(phase)
        copied = record.counts["residency/device_to_host_bytes"]
        found += [(phase, copied)] if copied else []
    return found


def test_the_reference_is_copied_to_the_host_once_in_a_run():
    assert bytes_copied_out("ref_params", ("init", *STEP, *STEP, *STEP)) == [("init", 1000)]


def test_training_weights_are_copied_out_only_after_they_were_written():
    once = bytes_copied_out("actor_params", ("init", *STEP, *STEP, "checkpoint", "init"))
    # Not again for the reference: the old log-probs only read them.
    assert once == [("init", 1000), ("rollout", 1000), ("init", 1000)]


CHANGED = {
    "reshard": {"rollout_weights"},
    "rollout": {"kv_cache"},
    "update": {"actor_params", "actor_grads", "optimizer"},
    "update_critic": {"critic_params", "critic_grads", "critic_optimizer"},
    # A resume reads them into the existing tensors.
    "checkpoint": {"actor_params", "optimizer"},
    "critic_checkpoint": {"critic_params", "critic_optimizer"},
}
"""The groups that each phase changes."""


@pytest.mark.parametrize(("phase", "group"), [(phase, group) for phase in CHANGED for group in sorted(CHANGED[phase])])
def test_what_a_phase_changes_outlives_the_next_absence(phase, group):
    """The host has an older copy. Like a collective or a kernel, the write does not change torch's version counters."""
    residency = Residency(lambda: True)
    tensor = torch.arange(6.0, device="npu")
    residency.register(group, StorageGroup(lambda: [tensor]))
    before = ["reshard"] if phase == "rollout" else []
    for each in ("init", *before, phase, "init", *before, phase):
        residency.enter(each)
    tensor.data.mul_(3)
    for each in ("init", *before, phase):
        residency.enter(each)
    assert tensor.tolist() == [0, 3, 6, 9, 12, 15]


def test_a_group_that_is_declared_written_is_copied_each_time(monkeypatch):
    declared = dict(PHASES) | {"ref": Phase(needs=frozenset({"ref_params"}), writes=frozenset({"ref_params"}))}
    monkeypatch.setattr(phases, "PHASES", declared)
    copied = bytes_copied_out("ref_params", ("init", *STEP, *STEP))
    assert copied == [("init", 1000), ("values", 1000), ("values", 1000)]


@settings(max_examples=100)
@given(SEQUENCES)
def test_what_leaves_is_called_changed_exactly_if_a_phase_wrote_it_since_it_came(sequence):
    residency, residents, _ = full()
    written = set()
    for phase in " ".join(sequence).split():
        before = {name for name, resident in residents.items() if resident.present}
        residency.enter(phase)
        left = {name for name in before if not residents[name].present}
        assert {name for name in left if residents[name].changed} == left & written
        written = (written - left) | PHASES[phase].writes


def test_a_phase_writes_only_what_it_needs():
    assert all(phase.writes <= phase.needs for phase in PHASES.values())


def test_writes_while_off_are_copied_afterwards():
    switch = [False]
    residency = Residency(lambda: switch[0])
    resident = Recorded("actor_params", [])
    residency.register("actor_params", resident)
    for phase in ("update", "ref"):
        residency.enter(phase)
    switch[0] = True
    residency.enter("init")
    assert resident.changed


def test_generation_without_a_reshard_before_it_rejected():
    residency, _, _ = full()
    residency.enter("update")
    with pytest.raises(ValueError, match="rollout may only follow reshard, not update"):
        residency.enter("rollout")
    assert residency.phase == "update"


def test_copied_bytes_and_one_emptied_cache_a_phase(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.npu, "empty_cache", lambda: emptied.append(1))
    residency, _, _ = full()
    residency.enter("init")
    residency.enter("update")
    counts = step_record.current_record().counts
    assert counts["residency/device_to_host_bytes"] == 5 * len(GROUPS)
    assert counts["residency/host_to_device_bytes"] == 3 * len(PHASES["update"].needs)
    assert len(emptied) == 2


def test_state_of_both_phases_does_not_move():
    residency, _, log = full()
    residency.enter("update")
    log.clear()
    residency.enter("reshard")
    assert "-actor_params" not in log and "+actor_params" not in log


def test_switched_off_everything_stays():
    residency, residents, log = full(enabled=False)
    for phase in PHASES:
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


def test_unknown_names_rejected():
    residency = Residency(lambda: True)
    with pytest.raises(ValueError, match="no phase needs a group 'gradients'. Groups are actor_params"):
        residency.register("gradients", Recorded("gradients", []))
    with pytest.raises(ValueError, match="unknown phase 'train'. Phases are init"):
        residency.enter("train")


def test_memory_is_recorded_under_the_phase_that_used_it():
    residency = Residency(lambda: True)
    residency.enter("update")
    used = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
    held = torch.npu.memory_allocated()
    del used
    residency.enter("init")
    residency.close()
    record = step_record.current_record()
    assert record.peak_bytes["update"] >= held
    assert record.allocated_bytes["update"] <= held - (1 << 20)
    assert record.peak_bytes["init"] <= held - (1 << 20)
    assert record.seconds["offload"] > 0
