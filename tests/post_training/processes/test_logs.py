"""The end of what a command printed."""

from post_training.processes.logs import last_error


def test_last_error_of_a_log(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("noise\nerror: first\nerror: the cause; the remedy\n(pid) more noise\n")
    assert last_error(log) == "the cause; the remedy"
    log.write_text("one\nlast line\n\n")
    assert last_error(log) == "last line"
    log.write_text("")
    assert last_error(log) == "it printed nothing"
