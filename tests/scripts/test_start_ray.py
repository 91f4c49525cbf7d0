"""The command `ray` without its servers: Ray Client is never started, and a Ray without a known switch is rejected."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest

from tests.scripts.cluster_files import load_script

program = load_script("scripts/internal/start_ray.py")
START = ["start", "--block", '--resources={"NPU": 4}', "--num-cpus=6"]


@pytest.fixture
def rays_command(monkeypatch):
    """Return a stand-in for Ray's command line that records whether it finds Ray Client."""
    command = SimpleNamespace(asked=[], check_ray_client_dependencies_installed=lambda: True)
    command.main = lambda: command.asked.append(command.check_ray_client_dependencies_installed())
    scripts = ModuleType("ray.scripts")
    scripts.scripts = command
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.scripts", scripts)
    return command


def test_ray_is_run_and_finds_no_ray_client(rays_command):
    program.main()
    assert rays_command.asked == [False]


def test_a_later_ray_finds_no_ray_client(rays_command):
    """Ray 2.60 asks for an error message instead."""
    del rays_command.check_ray_client_dependencies_installed
    rays_command.get_ray_client_dependency_error = lambda: None
    rays_command.main = lambda: rays_command.asked.append(rays_command.get_ray_client_dependency_error() is None)
    program.main()
    assert rays_command.asked == [False]


def test_a_ray_that_asks_otherwise_rejected(rays_command):
    del rays_command.check_ray_client_dependencies_installed
    with pytest.raises(SystemExit, match="this version of Ray decides differently whether to start Ray Client"):
        program.main()
    assert rays_command.asked == []


@pytest.mark.parametrize(("arguments", "dies"), [(START, 4), (["start", '--resources={"other": 1}'], 0), (["stop"], 0)])
def test_dies_that_the_node_gives_are_held_while_ray_runs(rays_command, monkeypatch, arguments, dies):
    noted = []

    @contextmanager
    def claimed_dies(count):
        noted.append(count)
        yield
        noted.append(rays_command.asked == [False])

    monkeypatch.setattr(program, "claimed_dies", claimed_dies)
    monkeypatch.setattr(sys, "argv", ["ray", *arguments])
    program.main()
    assert noted == [dies, True]


def test_die_of_another_job_starts_no_ray(rays_command, monkeypatch):
    @contextmanager
    def claimed_dies(count):
        raise program.DiesInUse("process 7 of anna has die 3")
        yield

    monkeypatch.setattr(program, "claimed_dies", claimed_dies)
    monkeypatch.setattr(sys, "argv", ["ray", *START])
    with pytest.raises(SystemExit, match="^error: process 7 of anna has die 3$"):
        program.main()
    assert rays_command.asked == []
