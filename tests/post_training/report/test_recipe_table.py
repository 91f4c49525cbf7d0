"""The printed recipe table, for a run, a run on emulated dies, and a published row."""

from __future__ import annotations

import pytest

from post_training.report.published import ROWS
from post_training.report.rates import StepStatistics
from post_training.report.recipe_table import Column, column_of_published, column_of_run, render
from post_training.report.run_folder import Run

SECONDS = {
    "rollout": 859.68, "old_log_prob": 0.0, "ref": 45.5, "reward": 1.25, "adv": None,
    "update": 400.0, "reshard": 12.0, "rest": 30.125,
}  # fmt: skip
STATISTICS = StepStatistics(8192, 77.8, 1576.6, 0.25, SECONDS, 1348.555, aside=348.555)
PEAK = 353.0
# Rates by the definitions in rates.py: 8192 x 1576.6 / 859.68 / 128, 8192 x 1654.4 / 400 / 128, and so on; "training
# only" is 8192 x 1654.4 / 1000 / 128.
PRINTED = """\
                                           night   published, true
                                       steps 2-4            step 2
seconds
  rollout                                 859.68            373.65
  old_log_prob                              0.00              0.00
  ref                                      45.50            144.50
  reward                                    1.25              5.00
  adv                                          -              0.21
  update                                  400.00            319.30
  reshard                                  12.00             11.50
  offload etc.                             30.12              5.50
  saving and validation                   348.56                 -
  total                                  1348.56            859.68
tokens a second and card
  rollout                                 117.37            271.05
  training                                264.70            331.60
  system                                   78.51            123.16
  system, training only                   105.88                 -
tokens a second and die
  rollout                                  58.69            135.53
  training                                132.35            165.80
  system                                   39.26             61.58
  system, training only                    52.94                 -
MFU of the update, %                           -            10.904
tokens in, mean                             77.8              77.8
tokens out, mean                          1576.6            1576.6
responses truncated, %                      25.0                 -
sequences                                   8192              8192
dies                                         256               256

MFU takes 353 TFLOPS a die for dense BF16 (a data sheet).
Recomputation does not count as work. Offload etc. is the rest of the total.
The total and system include saving and validation; training only excludes them.

night:
  - random weights
  - no MFU: the run kept no model.json and its model is not on this machine. Pass --model
  - the stages include 3.46 s of moving tensors to and from the host
  - it has not finished its 25 steps
"""


def column(**changes: object) -> Column:
    known: dict = {"name": "night", "dies": 256, "steps": (2, 3, 4), "planned_steps": 25, "statistics": STATISTICS}
    known |= {"offload": 3.456, "model": None, "emulated": False, "conditions": "random weights"}
    return column_of_run(Run(**known | changes), PEAK)


def test_a_run_beside_a_published_row():
    printed = render([column(), column_of_published(ROWS[0], PEAK)], PEAK, "a data sheet")
    assert printed.startswith(PRINTED)
    assert printed.removeprefix(PRINTED).startswith(f"\npublished, true:\n  - {ROWS[0].conditions[0]}\n  - ")


def test_without_a_name_that_is_longer_columns_have_eighteen_characters():
    lines = render([column()], PEAK, "x").splitlines()
    assert lines[0] == "night".rjust(48) and lines[3] == "  rollout" + "859.68".rjust(39)


def test_one_step_is_no_range():
    assert (column(steps=(7,)).steps, column(steps=(7, 8)).steps) == ("step 7", "steps 7-8")


def test_emulated_dies_say_nothing_of_an_npu():
    emulated = column(emulated=True, model={}, offload=None, planned_steps=None)
    assert emulated.mfu is None and len(emulated.notes) == 2 and "do not apply to an NPU" in emulated.notes[1]


def test_a_model_that_cannot_be_counted_is_a_note():
    unknown = column(model={"model_type": "unknown_model"})
    assert unknown.mfu is None and unknown.notes[1].startswith("no MFU: ") and "unknown_model" in unknown.notes[1]


def test_notes_are_wrapped_below_their_own_column():
    long = " ".join(["word"] * 40)
    lines = render([column(conditions=long)], PEAK, "x").splitlines()
    first = lines.index("night:") + 1
    assert lines[first].startswith("  - word") and lines[first + 1].startswith("    word")
    assert 105 <= len(lines[first]) <= 110 and max(map(len, lines)) <= 115


def test_as_values_it_has_what_a_die_does_too():
    values = column().as_dict()
    assert values["per_die"]["rollout"] == pytest.approx(values["per_card"]["rollout"] / 2)
    assert values["name"] == "night" and values["statistics"]["seconds"]["update"] == 400.0
