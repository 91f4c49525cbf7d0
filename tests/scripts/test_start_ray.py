"""The command `ray` without its servers: Ray Client is not asked for, and a Ray that asks otherwise is refused."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.scripts.cluster_files import load_script

program = load_script("scripts/internal/start_ray.py")


@pytest.fixture
def rays_command(monkeypatch):
    """Ray's command line as a module that says what it was asked; returns it."""
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


def test_a_ray_that_asks_otherwise_is_refused(rays_command):
    del rays_command.check_ray_client_dependencies_installed
    with pytest.raises(SystemExit, match="this Ray asks otherwise whether to start Ray Client"):
        program.main()
    assert rays_command.asked == []
