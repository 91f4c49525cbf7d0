"""Which records a resumed run keeps."""

import json

from verl_patches.features.training_checkpoint.run_records import set_aside_damaged, take_back_steps


def line(**values):
    return json.dumps(values) + "\n"


def record(step):
    return line(step=step, time=1.0, metrics={})


def fault(step):
    return line(step=step, time=1, kind="k", message="m")


def test_records_behind_the_checkpoint_go_from_every_file(tmp_path):
    """Faults without a step and all events stay: events belong to starts, not to steps."""
    (tmp_path / "metrics.jsonl").write_text(record(0) + record(1) + record(2) + record(3))
    (tmp_path / "faults.jsonl").write_text(fault(None) + fault(2) + fault(3))
    (tmp_path / "alerts.jsonl").write_text(line(step=2, alert="a") + line(step=3, alert="a"))
    (tmp_path / "events.jsonl").write_text(line(time=1, event="ray_ready") + line(time=9, event="ended"))
    take_back_steps(str(tmp_path), 2)
    assert (tmp_path / "metrics.jsonl").read_text() == record(0) + record(1) + record(2)
    assert (tmp_path / "faults.jsonl").read_text() == fault(None) + fault(2)
    assert (tmp_path / "alerts.jsonl").read_text() == line(step=2, alert="a")
    assert (tmp_path / "events.jsonl").read_text().count("\n") == 2
    for file in tmp_path.glob("*.jsonl"):
        assert file.stat().st_mode & 0o777 == 0o644, "another user's report reads them"
    take_back_steps("", 2)


def test_damaged_lines_are_set_aside_and_an_unfinished_one_stays(tmp_path):
    damaged = ["{\n", '{"step": true, "time": 1.0, "metrics": {}}\n', line(step=4, time=1.0), "[1]\n"]
    unfinished = record(6)[:-5]
    (tmp_path / "metrics.jsonl").write_text(record(1) + "".join(damaged) + "\n" + record(5) + unfinished)
    (tmp_path / "faults.jsonl").write_text("x\n")
    path = tmp_path / "metrics.jsonl"
    assert set_aside_damaged(tmp_path) == [
        f"{path}: 4 damaged lines were set aside in metrics.jsonl.damaged",
        f"{tmp_path}/faults.jsonl: 1 damaged line was set aside in faults.jsonl.damaged",
    ]
    assert path.read_text() == record(1) + record(5) + unfinished
    assert (tmp_path / "metrics.jsonl.damaged").read_text() == "".join(damaged)
    assert path.stat().st_mode & 0o777 == 0o644
    assert set_aside_damaged(tmp_path) == []
