"""The driver of a rehearsal starts Ray without helpers and with this project's set-up program, and runs verl in it."""

import sys

import pytest
from ray._private import ray_constants
from ray._private.node import Node

from rehearsal.stack_2026 import training


@pytest.fixture
def ended(monkeypatch) -> list[str]:
    """Keep the process's Ray settings, and record that Ray is shut down."""
    monkeypatch.setattr(ray_constants, "SETUP_WORKER_FILENAME", ray_constants.SETUP_WORKER_FILENAME)
    monkeypatch.setattr(sys, "argv", ["driver", "key=value"])
    said: list[str] = []
    monkeypatch.setattr("ray.shutdown", lambda: said.append("shutdown"))
    return said


def test_entry_point_starts_ray_without_helpers(ended, monkeypatch):
    helpers = (Node.start_monitor, Node.start_api_server)

    def run_module(name, *, run_name, alter_sys):
        assert (name, run_name, sys.argv) == ("verl.trainer.main_ppo", "__main__", ["main_ppo", "key=value"])
        assert {Node.start_monitor, Node.start_api_server}.isdisjoint(helpers)
        assert ray_constants.SETUP_WORKER_FILENAME.endswith("rehearsal/prefork/setup_worker.py")
        ended.append("ran")

    monkeypatch.setattr(training.runpy, "run_module", run_module)
    training.drive()
    assert ended == ["ran", "shutdown"] and (Node.start_monitor, Node.start_api_server) == helpers


def test_ray_ends_with_a_failed_entry_point(ended, monkeypatch):
    def run_module(*_, **__):
        raise SystemExit(1)

    monkeypatch.setattr(training.runpy, "run_module", run_module)
    with pytest.raises(SystemExit):
        training.drive()
    assert ended == ["shutdown"]
