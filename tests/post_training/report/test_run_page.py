"""report.html shows the contents of a run's folder, offline and whatever text a model wrote."""

import json
import os
from pathlib import Path

import pytest
import yaml

from post_training.report import LoggedStep, ReportError
from post_training.report.nodes import nodes_by_step
from post_training.report.run_page import _table, render_page, write_page
from tests.html_pages import StrictPage, shown_by_chromium

HOSTILE = "</pre><script>document.title='taken'</script><img src=http://example.org/x>"


def write_run(folder: Path, steps: int = 3, **metrics) -> Path:
    folder.mkdir()
    config = {
        "data": {"seed": 7},
        "trainer": {"n_gpus_per_node": 4, "nnodes": 1, "total_training_steps": 5, "wandb_api_key": "hidden-secret"},
        "actor_rollout_ref": {"overlay": {"precision": "bfloat16"}, "model": {"path": "/models/tiny"}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = []
    for step in range(1, steps + 1):
        values = {
            "critic/score/mean": step / 10,
            "timing_s/step": 4.0,
            "timing_s/gen": 1.0,
            "memory/peak_bytes/update": 2**20,
            "collectives/all_to_all/bytes": 4096.0,
            "training/rollout_logprob_diff_max": None if step == 2 else 1e-4,
            **metrics,
        }
        lines.append(json.dumps({"step": step, "time": 100.0 + step, "metrics": values}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    events = [{"time": 90.0, "event": "ray_ready"}, {"time": 95.0, "event": "training_begins"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    sample = {"group": 0, "prompt": "3*5", "response": HOSTILE, "truth": "15", "reward": 1.0, "tokens": 3}
    (folder / "samples.first.json").write_text(json.dumps({"step": 1, "samples": [sample]}))
    (folder / "memory").mkdir()
    for rank in (10, 9):
        (folder / "memory" / f"{rank}.json").write_text(
            json.dumps({"rank": rank, "peak_bytes": {"update": 3 * 2**20}, "end_bytes": {}})
        )
    return folder


def end(folder: Path, status: str, message: str = "") -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 120.0, "event": "ended", "status": status, "message": message}) + "\n")


def test_the_table_has_the_first_the_last_the_lowest_and_the_highest_value():
    records = [LoggedStep(step, 0.0, {"m": value}) for step, value in enumerate((3.0, 1.0, None, 7.0, 5.0), 1)]
    assert _table([*records, LoggedStep(6, 0.0, {"empty": None})]) == [
        ("empty", ["-", "-", "-", "-", "1"]),
        ("m", ["3", "5", "1", "7", "1"]),
    ]


def test_the_page_tells_what_the_folder_holds(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "faults.jsonl").write_text('{"kind": "x", "step": 2, "message": "an update was skipped"}\n')
    (run / "alerts.jsonl").write_text('{"time": 1, "step": 2, "alert": "kl", "message": "alert kl at step 2"}\n')
    text = " ".join(StrictPage(render_page(run)).text.split())
    for told in (
        "alert kl at step 2",
        "going on",
        "3 of 5 steps on 4 dies",
        "seed 7",
        "/models/tiny",
        "an update was skipped",
        "0.200 → 0.200",
    ):
        assert told in text, told
    assert "9 3 MiB 10 3 MiB" in text
    assert "Not recorded by this run: " in text and "Entropy" in text.partition("Not recorded")[2]
    named = {**yaml.safe_load((run / "config.yaml").read_text()), "monitoring_config": {"dashboard": "production"}}
    assert "<title>run</title>" in render_page(run)
    named["trainer"]["n_gpus_per_node"] = 1
    (run / "config.yaml").write_text(yaml.safe_dump(named))
    assert "<title>production</title>" in render_page(run) and "steps on 1 die," in render_page(run)
    assert "hidden-secret" not in render_page(run) and "wandb_api_key: '***'" in text


def test_page_before_the_first_step_promises_its_metrics(tmp_path):
    run = write_run(tmp_path / "run")
    assert "after step 1" not in render_page(run)
    (run / "metrics.jsonl").write_text("")
    text = render_page(run)
    assert "after step 1" in text and "not measured" not in text


@pytest.mark.parametrize(
    ("trainer", "said"),
    [({"n_gpus_per_node": 16, "nnodes": 16}, "on 256 dies,"), ({"n_gpus_per_node": 8}, "on 8 dies,"),
     ({"nnodes": 2}, "on 0 dies,")],
)  # fmt: skip
def test_the_dies_are_those_of_all_nodes(tmp_path, trainer, said):
    run = write_run(tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"] = {"total_training_steps": 5} | trainer
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert said in render_page(run)


def test_a_response_is_text_and_nothing_else(tmp_path):
    page = render_page(write_run(tmp_path / "run"))
    strict = StrictPage(page)  # raises at an address
    assert (
        HOSTILE in strict.text and "script" not in strict.tags and "http://" not in page.replace("http://example", "")
    )


def test_a_browser_shows_it_without_running_a_response(tmp_path):
    run = write_run(tmp_path / "run")
    shown = shown_by_chromium(write_page(run), tmp_path / "profile")
    if shown is None:
        pytest.skip("NOT RUN: no Chromium is installed; the page was only parsed")
    assert "<title>run</title>" in shown and shown.count("<svg") >= 5 and "<img" not in shown


def test_end_of_a_run_is_that_of_its_last_start(tmp_path):
    run = write_run(tmp_path / "run")
    end(run, "failed", "a die ran out of memory")
    assert "failed: a die ran out of memory" in StrictPage(render_page(run)).text
    (run / "summary.json").write_text('{"failure": "it ended after 3 of 5 steps"}')
    os.utime(run / "summary.json", (121, 121))
    assert "failed: it ended after 3 of 5 steps" in StrictPage(render_page(run)).text
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time": 130.0, "event": "ray_ready"}\n')
    assert "going on" in render_page(run)
    end(run, "finished")
    assert "finished" in StrictPage(render_page(run)).text


def test_only_the_page_of_an_active_run_refreshes(tmp_path):
    run = write_run(tmp_path / "run")
    assert "setInterval" in render_page(run, live=True) and "setInterval" not in render_page(run)
    end(run, "finished")
    assert "setInterval" not in render_page(run, live=True)


def test_a_run_without_a_step_has_a_page_and_no_run_rejected(tmp_path):
    run = write_run(tmp_path / "run", steps=0)
    assert "Not recorded by this run: Reward" in StrictPage(render_page(run)).text
    with pytest.raises(ReportError, match="is not a folder"):
        render_page(tmp_path / "absent")
    with pytest.raises(ReportError, match=r"it has no config\.yaml"):
        render_page(tmp_path)
    (run / "samples.first.json").write_text('{"step": 1}')
    with pytest.raises(ReportError, match=r"samples\.first\.json does not contain samples"):
        render_page(run)


def test_the_strict_reader_finds_what_is_wrong():
    for page in ("<!doctype html><p><b></p></b>", "<!doctype html><p>", "<!doctype html><img src=x>", "<p></p>"):
        with pytest.raises(AssertionError):
            StrictPage(page)


def test_page_says_on_how_many_nodes_each_step_was_made(tmp_path):
    """A node is lost after step 4 (checkpoint 2) and returns at step 6; the last failure loses no node."""
    folder = write_run(tmp_path / "run", steps=9)
    starts = [(2, 0, "as configured"), (1, 2, "FSDP over 8 dies"), (2, 6, "as configured"), (2, 8, "as configured")]
    entries = [{"message": "of 2 nodes it can continue with 1"}]
    entries += [{"nodes": n, "of_nodes": 2, "from_step": step, "layout": text} for n, step, text in starts]
    (folder / "supervision.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))
    stretches = [(each.first, each.last, each.nodes) for each in nodes_by_step(folder, 9)]
    assert stretches == [(1, 2, 2), (3, 6, 1), (7, 9, 2)]
    page = render_page(folder)
    assert "<tr><td>3 to 6</td><td>1 of 2</td><td>FSDP over 8 dies</td></tr>" in page
    (folder / "supervision.jsonl").unlink()
    assert "Nodes by step" not in render_page(folder)
