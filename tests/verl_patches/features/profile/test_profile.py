"""Exactly the chosen steps and ranks are recorded, in torch_npu's format, and impossible choices are rejected."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import pytest

from overlay import ConfigurationError, SettingsError
from tests.forked import PYTORCH
from tests.ranks import run_ranks
from tests.verl_patches.features.profile.steps_program import STEPS
from verl_patches.features.profile.steps import ProfiledSteps
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose


class Driver:
    """The calls that verl's loop makes to workers: two generation batches per step, and a validation in odd steps."""

    def __init__(self, chosen) -> None:
        self.global_steps, self.told, self.recorded = 0, [], None
        self.calls: list[tuple[str, int, int | None]] = []
        steps = ProfiledSteps(chosen, lambda: self.global_steps, self.tell)
        self.generate = steps.beginning_first(lambda batch: self.note("generate"))
        self.update = steps.ending_after(lambda batch: self.note("update"))

    def tell(self, step) -> None:
        self.recorded = step
        self.told.append(step)

    def note(self, what) -> str:
        self.calls.append((what, self.global_steps, self.recorded))
        return what

    def fit(self, first: int, last: int) -> None:
        training, validation = SimpleNamespace(meta_info={}), SimpleNamespace(meta_info={"validate": True})
        for self.global_steps in range(first, last + 1):
            if self.global_steps % 2:
                self.generate(validation)
            assert self.generate(training) == self.generate(training) == "generate"
            assert self.update(training) == "update"
            if self.global_steps % 2:
                self.generate(validation)


def test_a_chosen_step_is_recorded_from_its_first_generation_to_its_update():
    driver = Driver([1, 5, 10])
    driver.fit(1, 12)
    assert driver.told == [1, None, 5, None, 10, None]
    for what, step, recorded in driver.calls:
        assert recorded in (None, step), (what, step)
    recorded = [(what, step) for what, step, of in driver.calls if of is not None]
    assert recorded == [(what, step) for step in (1, 5, 10) for what in ("generate", "generate", "update")]


def test_a_run_that_goes_on_behind_a_chosen_step_does_not_record_it():
    driver = Driver([1, 5])
    driver.fit(4, 6)
    assert driver.told == [5, None]


def test_a_recording_is_of_its_step_and_rank_and_the_next_begins_anew(tmp_path):
    run_ranks("tests.verl_patches.features.profile.steps_program", 2, tmp_path, 300, imported=PYTORCH)
    found = {folder.parent.name: folder for folder in (tmp_path / "profile").glob("step_*/*")}
    assert found.keys() == {f"step_{step}" for step in STEPS}
    for step in STEPS:
        folder = found[f"step_{step}"]
        assert folder.name.startswith("rank_1_") and folder.name.endswith("_ascend_pt")
        assert json.loads((folder / "profiler_metadata.json").read_text())["training_step"] == step
        trace = json.loads((folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text())
        host = [event for event in trace if event.get("name") == "aten::matmul"]
        assert len(host) == 1, json.dumps(host)
        kernels = [event["name"] for event in trace if "Task Type" in event.get("args", {})]
        assert kernels.count("aclnnMatmul") == 1, "and none of another step"
        with (folder / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv").open() as file:
            assert len(list(csv.DictReader(file))) >= 1


KEY = "actor_rollout_ref.overlay.profile"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"{KEY}.steps=[0]"], r"profile.steps=\[0\] is invalid: 0 is not a whole number of at least 1"),
        ([f"{KEY}.steps=[1,x]"], r"'x' is not a whole number"),
        ([f"{KEY}.steps=3"], "=3 is invalid. Set it to a value of type list"),
        (
            [f"{KEY}.steps=[9]", "trainer.total_training_steps=8"],
            "9 is never reached, trainer.total_training_steps is 8",
        ),
        (
            [f"{KEY}.steps=[1]", f"{KEY}.ranks=[4]"],
            r"ranks=\[4\] is invalid: 4 is never reached, .* dies is 3",
        ),
        ([f"{KEY}.steps=[1]", f"{KEY}.ranks=[]"], "records nothing"),
        ([f"{KEY}.steps=[1]", f"{KEY}.level=Level3"], "Set it to one of Level0, Level1, Level2"),
        ([f"{KEY}.steps=[1]", "actor_rollout_ref.overlay.measure.output_dir=''"], "which is empty"),
    ],
)
def test_invalid_record_settings_rejected(overrides, says):
    with pytest.raises((ConfigurationError, SettingsError), match=says):
        check_configuration(compose("rehearsal", overrides))


def test_nothing_is_recorded_by_default():
    assert not OverlaySettings().profile.steps
    driver = Driver(OverlaySettings().profile.steps)
    driver.fit(1, 3)
    assert driver.told == []
    chosen = check_configuration(compose("rehearsal", [f"{KEY}.steps=[1,5,10]", f"{KEY}.ranks=[0,3]"]))
    assert list(chosen.profile.steps) == [1, 5, 10] and list(chosen.profile.ranks) == [0, 3]
