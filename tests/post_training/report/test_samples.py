"""Preparing samples for the report page."""

import json

import pytest

from post_training.report import ReportError
from post_training.report.samples import CHARACTERS, FIRST, LAST, Sample, StepSamples, read_samples, shortened

SAMPLE = Sample(group=1, prompt="3*5", response="15", truth="15", reward=None, tokens=2)


def test_a_text_keeps_its_beginning_and_its_end():
    assert CHARACTERS == 4000
    assert shortened("x" * 4000) == "x" * 4000
    assert shortened("a" * 2001 + "b" * 2002) == "a" * 2000 + " [... 3 characters ...] " + "b" * 2000


def test_what_no_page_can_hold_is_replaced_and_tabs_and_lines_stay():
    assert shortened("a\x00b\x1fc\x7fd\ud800e\tf\ng\rh") == "a\ufffdb\ufffdc\ufffdd\ufffde\tf\ng\rh"


def write(folder, name, step, *samples):
    (folder / name).write_text(json.dumps({"step": step, "samples": [each.as_dict() for each in samples]}))


def test_the_first_and_the_last_step_are_read_in_order(tmp_path):
    assert read_samples(tmp_path) == []
    write(tmp_path, LAST, 9, SAMPLE)
    assert read_samples(tmp_path) == [StepSamples(9, (SAMPLE,))]
    write(tmp_path, FIRST, 2, SAMPLE, SAMPLE)
    assert read_samples(tmp_path) == [StepSamples(2, (SAMPLE, SAMPLE)), StepSamples(9, (SAMPLE,))]
    write(tmp_path, FIRST, 9)
    assert read_samples(tmp_path) == [StepSamples(9, (SAMPLE,))], "a run of one step has them once"


@pytest.mark.parametrize("text", ["{", "{}", '{"step": 1, "samples": [{"group": 1}]}', '{"step": "x", "samples": []}'])
def test_a_file_in_another_form_is_named(tmp_path, text):
    (tmp_path / FIRST).write_text(text)
    with pytest.raises(ReportError, match=r"samples\.first\.json does not contain samples of a step: "):
        read_samples(tmp_path)
