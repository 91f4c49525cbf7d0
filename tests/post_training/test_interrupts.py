"""Ctrl-C is acknowledged before waiting for anything."""

import os
import signal
from argparse import Namespace
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest

from post_training.checkpoint import command_line
from post_training.interrupts import acknowledged
from post_training.processes.command import SignalFlag
from verl_patches.trainer import main_ppo
from verl_patches.trainer.ray_connection import no_source

STOPPING = "\ninterrupted; stopping"


@pytest.fixture(autouse=True)
def heard():
    """Python's own SIGINT handler; some test harnesses start Python with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_sentence_is_written_before_the_interrupt(capfd):
    with pytest.raises(KeyboardInterrupt), acknowledged("stopping", (signal.SIGINT, signal.SIGTERM)) as received:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            assert capfd.readouterr().err == "\nstopping\n" and received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_signal_and_forked_child_keep_silent(capfd):
    with acknowledged("stopping") as received:
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        # Libraries may print at a fork; tokenizers does if an earlier test used it.
        assert "stopping" not in capfd.readouterr().err
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "\nstopping\n" and len(received) == 2


def test_ignored_signal_stays_ignored(capfd):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with acknowledged("stopping") as received:
        signal.raise_signal(signal.SIGINT)
    assert received == [] and capfd.readouterr().err == ""


def test_training_acknowledges_before_it_stops_ray(monkeypatch, capfd):
    seen = []

    @contextmanager
    def ray(*_):
        try:
            yield None
        finally:
            seen.append(capfd.readouterr().err)

    monkeypatch.setattr(main_ppo, "connected_ray", ray)
    monkeypatch.setattr(main_ppo, "_claimed_dies", lambda config: nullcontext())
    monkeypatch.setattr(main_ppo, "_watching", lambda config: nullcontext())
    monkeypatch.setattr(main_ppo, "_train", lambda config, own: signal.raise_signal(signal.SIGINT))
    code, sentence, reason = main_ppo._carry_out(mock.sentinel.config, no_source)
    assert (code, sentence, reason) == (130, "interrupted; all processes of this run have been stopped", None)
    assert seen == [f"{STOPPING} all processes of this run\n"]


def test_conversion_acknowledges_before_it_waits_for_workers(monkeypatch, capfd):
    seen = []

    def run(*_):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            seen.append(capfd.readouterr().err)

    monkeypatch.setattr(command_line, "run", run)
    assert command_line.run_tool(Namespace(workers=1), lambda options: None) == 130
    assert seen == [f"{STOPPING} the workers, keeping finished files\n"]
    assert capfd.readouterr().err == "stopped; run the same command again to resume\n"


def test_flag_is_acknowledged_at_once(capfd):
    with SignalFlag() as signals:
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err.startswith("\nSIGINT: stopping all processes")
    assert signals.received == [signal.SIGINT]
