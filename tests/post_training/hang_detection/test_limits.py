"""Processes that exceed the limits between heartbeats are named in time, with a simulated clock."""

from dataclasses import replace

import pytest

from post_training.hang_detection.limits import Watch, in_words
from post_training.hang_detection.settings import EndSeconds, WarnSeconds, WatchSettings
from post_training.hang_detection.signs import TRAINER, Sign

SETTINGS = WatchSettings(
    interval_s=1.0, warn_s=WarnSeconds(silent=20, start=50, update=30), end_s=EndSeconds(silent=40, start=80, update=60)
)
REDUCE, COMPUTE = "waits in all_reduce", "at mlp.py:7 in forward"


class Run:
    """A trainer and four ranks that send one heartbeat a second, until a test stops some of them."""

    def __init__(self, ranks=4):
        self.now = 0.0
        self.watch = Watch(SETTINGS, ranks, lambda: self.now)
        self.signs = {name: self.sign(name) for name in (TRAINER, *map(str, range(ranks)))}

    @staticmethod
    def sign(name):
        return Sign(name, 0, 0, None, COMPUTE, 3 if name == TRAINER else None, "node-a", 100 + len(name), 1.0)

    def change(self, *names, **changes):
        for name in names:
            self.signs[name] = replace(self.signs[name], moves=self.signs[name].moves + 1, **changes)

    def go_on(self, seconds, stopped=(), moving=()):
        """Let `seconds` pass; `stopped` send nothing, and of the others only `moving` make progress."""
        for _ in range(seconds):
            self.now += 1
            for name, sign in self.signs.items():
                if name not in stopped:
                    self.signs[name] = replace(sign, serial=sign.serial + 1, moves=sign.moves + (name in moving))
                self.watch.hear(self.signs[name])
        return self.watch.stopped()


@pytest.fixture
def run():
    running = Run()
    running.change("0", "1", "2", "3", phase="update", where=COMPUTE)
    running.go_on(1)
    return running


def test_a_stopped_rank_is_named_and_not_those_that_wait_for_it(run):
    run.change("0", "1", "3", where=REDUCE)
    assert run.go_on(20, stopped="2") == []
    (stop,) = run.go_on(1, stopped="2")
    assert (stop.name, stop.phase, stop.seconds, stop.silent, stop.beyond_end) == ("2", "update", 21, True, False)
    assert stop.sentence() == (
        "rank 2 (process 101 on node-a) has not answered for 21 s in update of step 3, last at mlp.py:7 in forward; "
        "ranks 0, 1 and 3 wait for it"
    )
    run.go_on(18, stopped="2")
    assert [(stop.name, stop.beyond_end) for stop in run.go_on(1, stopped="2")] == [("2", False)]
    assert [(stop.name, stop.beyond_end) for stop in run.go_on(1, stopped="2")] == [("2", True)]


@pytest.mark.parametrize("stopped", ["silent", "computing"])
def test_ranks_that_have_not_begun_are_not_blamed(stopped):
    """Ranks 2 and 3 are still starting on another node, and have time until their own limit."""
    run = Run(ranks=2)
    run.watch = Watch(SETTINGS, 4, lambda: run.now)
    run.go_on(1)
    run.change("0", phase="update", where=COMPUTE)
    run.change("1", phase="update", where=REDUCE)
    silent = "0" if stopped == "silent" else ""
    found = run.go_on(21 if silent else 32, stopped=silent)
    assert [(stop.name, stop.waiting) for stop in found] == [("0", (1,))]
    found = run.go_on(30, stopped=silent)
    unstarted = [(stop.name, stop.sentence()) for stop in found if stop.sign is None]
    assert [name for name, _ in unstarted] == ["2", "3"] and "rank 2 has not started for" in unstarted[0][1]


def test_one_whose_signs_are_late_is_not_silent(run):
    """Ray's head may be busy, so three heartbeats may be missing before a rank counts as silent."""
    run.change("0", "1", "3", where=REDUCE)
    run.go_on(29)
    assert [stop.name for stop in run.go_on(3, stopped="1")] == ["2"]
    assert [(stop.name, stop.silent) for stop in run.go_on(1, stopped="1")] == [("1", True)]


def test_continuing_rank_is_not_named(run):
    assert run.go_on(25, stopped="2") and run.go_on(1) == []


def test_a_slow_rank_that_makes_progress_is_not_named(run):
    run.change("0", "1", "3", where=REDUCE)
    assert run.go_on(500, moving="0123") == []


def test_a_rank_that_computes_without_end_is_named_and_not_as_silent(run):
    run.change("0", "1", "3", where=REDUCE)
    run.go_on(1)
    assert run.go_on(30) and run.watch.stopped()[0].seconds >= 30
    (stop,) = run.watch.stopped()
    assert stop.name == "2" and not stop.silent and stop.waiting == (0, 1, 3)
    assert "rank 2 (process 101 on node-a) has made no progress for 3" in stop.sentence()
    assert run.go_on(30)[0].beyond_end


def test_ranks_that_wait_for_a_slow_one_are_not_named(run):
    """Pipeline stages, and ranks during a checkpoint, wait like this: only the slow rank makes progress."""
    run.change("0", "1", "3", where=REDUCE)
    for _ in range(20):
        assert run.go_on(29) == []
        run.change("2")
    (stop,) = run.go_on(32)
    assert (stop.name, stop.waiting) == ("2", (0, 1, 3))


def test_progress_of_the_training_loop_excuses_no_rank(run):
    run.change("0", "1", "2", "3", where=REDUCE)
    assert [stop.name for stop in run.go_on(32, moving=(TRAINER,))] == ["0", "1", "2", "3"]


def test_progress_is_counted_over_all_processes(run):
    before = run.watch.progress
    run.go_on(5)
    assert run.watch.progress == before, "heartbeats alone are no progress"
    run.go_on(3, moving="02")
    assert run.watch.progress == before + 6 and run.watch.newest.name == "2"
    assert run.watch.step == 3


def test_if_all_wait_for_each_other_all_are_named(run):
    run.change("0", "1", "2", "3", where=REDUCE)
    assert [stop.name for stop in run.go_on(32)] == ["0", "1", "2", "3"]


def test_one_that_stopped_between_two_phases_is_named_when_the_others_are_over_their_limit():
    run = Run()
    run.watch = Watch(replace(SETTINGS, warn_s=replace(SETTINGS.warn_s, silent=1000)), 4, lambda: run.now)
    run.go_on(1)
    run.change("0", "1", "3", phase="update", where=REDUCE)
    (stop,) = run.go_on(32, stopped="2")
    assert (stop.name, stop.phase, stop.waiting) == ("2", None, (0, 1, 3))
    assert "between two phases" in stop.sentence()


def test_waiting_for_work_has_no_limit(run):
    run.change("0", "1", "2", "3", phase=None)
    assert run.go_on(5000) == []


def test_a_phase_without_a_limit_of_its_own_has_that_of_silence(run):
    run.change("0", "1", "2", "3", phase="unknown")
    assert run.go_on(5000) == []
    assert [stop.name for stop in run.go_on(21, stopped="1")] == ["1"]


def test_each_phase_has_its_own_limit(run):
    run.change("0", phase="rollout")
    assert [stop.name for stop in run.go_on(31)] == ["1", "2", "3"]
    assert "0" in [stop.name for stop in run.go_on(300)]


@pytest.mark.parametrize("before", [None, "unknown"])
def test_phase_starts_its_own_time_and_is_no_progress(before):
    """The training loop starts to work after waiting for its workers, and has made no progress yet."""
    run = Run()
    run.change("0", "1", "2", "3", phase=before)
    run.go_on(200)
    run.signs["2"] = replace(run.signs["2"], phase="update")  # its progress counter is unchanged
    known = run.watch.progress
    assert run.go_on(31) == [] and run.watch.progress == known
    (stop,) = run.go_on(1)
    assert (stop.name, stop.seconds, stop.silent) == ("2", 31, False)


def test_a_stopped_training_loop_is_named(run):
    run.change("0", "1", "2", "3", phase=None)
    (stop,) = run.go_on(21, stopped=(TRAINER,))
    assert stop.name == TRAINER and stop.sentence().startswith("the trainer (process 107 on node-a) has not answered")


def test_the_loop_first_and_then_its_workers_have_to_start():
    now = [0.0]
    watch = Watch(SETTINGS, 2, lambda: now[0])
    now[0] = 50.0
    assert watch.stopped() == []
    now[0] = 51.0
    assert [stop.sentence() for stop in watch.stopped()] == ["the trainer has not started for 51 s"]
    watch.hear(Run.sign(TRAINER))
    watch.hear(Run.sign("1"))
    now[0] = 102.0
    watch.hear(replace(Run.sign(TRAINER), serial=1))
    watch.hear(replace(Run.sign("1"), serial=1))
    assert [stop.sentence() for stop in watch.stopped()] == ["rank 0 has not started for 51 s"]
    now[0] = 132.0
    watch.hear(replace(Run.sign(TRAINER), serial=2))
    watch.hear(replace(Run.sign("1"), serial=2))
    assert [stop.beyond_end for stop in watch.stopped()] == [True]


def test_a_process_in_the_place_of_another_is_progress(run):
    """Ray restarts a worker under the same rank, whose counters start again and may equal those of the old one."""
    run.go_on(25)
    before = run.watch.progress
    run.signs["2"] = replace(run.signs["2"], pid=4711, serial=run.signs["2"].serial - 1)
    assert [stop.name for stop in run.go_on(1)] == [] and run.watch.progress == before + 1
    assert run.watch.newest.pid == 4711
    assert [stop.name for stop in run.go_on(10)] == ["0", "1", "3"]


def test_many_that_wait_are_counted():
    assert in_words([4]) == "rank 4 waits" and in_words([0, 1]) == "ranks 0 and 1 wait"
    assert in_words(range(255)) == "ranks 0, 1, 2, 3, 4, 5 and 249 more wait"


def test_ranks_are_named_in_the_order_of_their_numbers_and_the_trainer_last():
    running = Run(ranks=11)
    running.go_on(1)
    stopped = running.go_on(21, stopped=(TRAINER, "10", "9", "0"))
    assert [stop.name for stop in stopped] == ["0", "9", "10", TRAINER]
