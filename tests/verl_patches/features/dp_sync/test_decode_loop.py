"""What the decode loop counts: every figure at every event, so that all ranks report the same names."""

from verl_patches.features.dp_sync.decode_loop import FIGURES, _count
from verl_patches.features.measure import step_record


def test_an_event_counts_its_own_figures_and_names_the_others(monkeypatch):
    record = step_record.StepRecord()
    monkeypatch.setattr(step_record, "_record", record)
    _count(agreements=1)
    _count(decode_steps=3, wasted_steps=1)
    counted = {name: record.counts[f"rollout/{name}"] for name in FIGURES}
    assert counted == dict.fromkeys(FIGURES, 0) | {"agreements": 1, "decode_steps": 3, "wasted_steps": 1}
