"""scripts/report.py, and the server behind scripts/watch.sh."""

import http.client
import json
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from scripts import report
from scripts.internal.watch_run import RunServer
from tests.html_pages import StrictPage, shown_by_chromium
from tests.post_training.report.test_run_page import end, write_run

ROOT = Path(__file__).parents[2]


def test_the_page_is_written_where_it_is_asked_for(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert report.main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    StrictPage((run / "report.html").read_text())
    assert report.main([str(run), "--output", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()


def test_two_runs_are_compared(tmp_path, capsys):
    runs = [write_run(tmp_path / name) for name in ("first", "second")]
    assert report.main([str(run) for run in runs]) == 0
    assert capsys.readouterr().out.strip() == str(runs[1] / "comparison.html")
    StrictPage((runs[1] / "comparison.html").read_text())


@pytest.mark.parametrize(
    "arguments", [["absent"], ["run", "--output", "absent/page.html"], ["run", "absent"], ["run", "run"]]
)
def test_invalid_request_rejected_in_one_sentence(tmp_path, capsys, monkeypatch, arguments):
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert report.main(arguments) == 2
    ended = capsys.readouterr()
    assert ended.out == "" and ended.err.startswith("error: ") and ended.err.count("\n") == 1


@pytest.fixture
def server(tmp_path):
    run = write_run(tmp_path / "run")
    with RunServer(run, 0) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield run, made
        made.shutdown()


def get(server, path="/", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_grows_with_the_run(server):
    run, server = server
    assert server.server_address[0] == "127.0.0.1"
    status, page = get(server)
    assert status == 200 and "3 of 5 steps" in page and "setInterval" in page
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "time": 1.0, "metrics": {}}) + "\n")
    assert "4 of 5 steps" in get(server)[1]
    end(run, "finished")
    assert "setInterval" not in get(server)[1]


def test_a_browser_takes_the_newer_page_by_itself_until_the_run_has_ended(server, tmp_path, monkeypatch):
    run, server = server
    page, steps = server.page, [4, 5, 6, 7]  # one is logged before every answer

    def growing():
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": steps.pop(0), "time": 1.0, "metrics": {}}) + "\n")
        return page()

    monkeypatch.setattr(server, "page", growing)
    address = f"http://127.0.0.1:{server.server_port}/"
    seen = shown_by_chromium(address, tmp_path / "profile", milliseconds=4000)
    if seen is None:
        pytest.skip("NOT RUN: no Chromium is installed; the page was only parsed")
    assert "5 of 5 steps" in seen and steps == [6, 7]
    end(run, "finished")
    assert "6 of 5 steps" in shown_by_chromium(address, tmp_path / "profile", milliseconds=4000) and steps == [7]


def test_page_waits_for_the_first_step_and_then_shows_the_run(tmp_path):
    run = tmp_path / "run"
    with RunServer(run, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def waits_for(part):
            status, page = get(server)
            StrictPage(page)
            return status == 200 and f"Waiting for the first step of {run}: {part}." in page and "refresh" in page

        assert waits_for("the folder does not exist yet")
        run.mkdir()
        assert waits_for("the folder has no config.yaml yet")
        run.rmdir()
        metrics = (write_run(run) / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").unlink()
        assert waits_for("the first step has not ended yet")
        # An incomplete line is a record that is still being written.
        (run / "metrics.jsonl").write_text(metrics.splitlines()[0])
        assert waits_for("the first step has not ended yet")
        (run / "metrics.jsonl").write_text(metrics)
        status, page = get(server)
        assert status == 200 and "3 of 5 steps" in page and "Waiting" not in page
        server.shutdown()


def test_run_that_failed_before_its_first_step_is_shown(server):
    run, server = server
    (run / "metrics.jsonl").unlink()
    end(run, "failed", "a die ran out of device memory")
    status, page = get(server)
    assert status == 200 and "a die ran out of device memory" in page and "Waiting" not in page


def test_watch_says_that_it_waits_and_ends_with_ctrl_c(tmp_path):
    # Python keeps ignoring SIGINT if it was ignored at its start, as it is below some test harnesses.
    with subprocess.Popen(
        ["bash", "scripts/watch.sh", tmp_path / "absent"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        address, waits = process.stdout.readline(), process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=600)
    assert "http://127.0.0.1:" in address
    assert waits.startswith("Waiting for the first step: the folder does not exist yet.")
    assert (process.returncode, rest) == (0, ("", ""))


def test_nothing_else_is_served_and_no_other_site_may_ask(server):
    run, server = server
    for path in ("/config.yaml", "/../run/config.yaml", "/?x"):
        assert get(server, path)[0] == 404
    assert get(server, host="example.org")[0] == 403
    assert get(server, host=f"localhost:{server.server_port}")[0] == 200
    (run / "config.yaml").write_text("- no keys")
    status, page = get(server)
    assert status == 503 and "it has no keys" in page and 'http-equiv="refresh"' in page


@pytest.mark.parametrize("arguments", [[], ["README.md"], [".", "--port", "x"], [".", "more"], [".", "--wrong"]])
def test_watch_rejects_what_it_does_not_understand(arguments):
    ended = subprocess.run(
        ["bash", "scripts/watch.sh", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 2 and ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
