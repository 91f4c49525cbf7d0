"""Trainings of the tests, which share one import of the stack: driver and workers are forked from a template.

`python -m tests.shared_training` takes the arguments of `python -m rehearsal`, and `command_of` those of
`python -m rehearsal.training`. Imports would take a third to two thirds of a short training's CPU time.

Not for tests of how a run ends: its workers descend from the template, not from the run.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

from omegaconf import DictConfig

from post_training.terminal import escape_output
from rehearsal import __main__ as program
from rehearsal.plan import Options, RehearsalPlan, make_plan, run_environment
from rehearsal.prefork import set_up_workers_quickly
from rehearsal.training import WORKERS
from tests.shared_templates import await_workers, client_of, share, started_with
from verl_patches.trainer import main_ppo
from verl_patches.trainer.isolated_ray import ON_LOOPBACK

# The overlay first, so that it sees every later import; then what keeps the forks' IDs apart.
MODULES = (
    "verl_patches.prelude_patch", "torch", "rehearsal.prefork.ray_ids", *WORKERS["megatron"], "vllm",
    "vllm_ascend.worker.worker_v1", "verl.trainer.main_ppo",
)  # fmt: skip
_DRIVER = "from tests.shared_training import drive; drive()"
_run_command = RehearsalPlan.run_command


@dataclass(frozen=True)
class _SharedWorkers:
    """The source of a run's workers: a template that outlives it."""

    py_executable: str

    def close(self) -> None:
        await_workers()


def share_templates() -> None:
    """Start a template for rehearsals and one for other jobs, which import in another environment."""
    with mock.patch.dict(os.environ, started_with({}), clear=True):
        rehearsed = os.environ | make_plan(Options(), "").environment()
    for environment in (rehearsed, started_with({}) | run_environment(())):
        share(MODULES, environment, **ON_LOOPBACK)


def run_command(plan: RehearsalPlan) -> list[str]:
    """Return the command of a plan's training, as a fork if a template suits it."""
    _, _, _, *arguments = command = _run_command(plan)
    client = client_of(MODULES, {**os.environ, **plan.environment()})
    return command if client is None else _forked(client, arguments)


def command_of(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command of a training in this environment, as a fork if a template suits it."""
    client = client_of(MODULES, environment)
    return [sys.executable, "-m", "rehearsal.training", *arguments] if client is None else _forked(client, arguments)


def _forked(client: str, arguments: Sequence[str]) -> list[str]:
    return [*shlex.split(client), "-c", _DRIVER, client, *arguments]


def drive() -> None:
    """Train in this process as `rehearsal.training` does, with workers from the template that this was forked from."""
    client = sys.argv.pop(1)

    def start_workers(config: DictConfig) -> _SharedWorkers:
        set_up_workers_quickly()
        return _SharedWorkers(client)

    sys.exit(main_ppo.main(start_workers=start_workers))


if __name__ == "__main__":
    RehearsalPlan.run_command = run_command  # type: ignore[method-assign]
    escape_output(standard_output=False)
    sys.exit(program.main())
