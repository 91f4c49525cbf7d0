"""Rejects, before Ray starts, steps that could not be recorded completely enough to replay them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from post_training.report.run_folder import at
from verl_plugin.sentences import invalid
from verl_plugin.trainer_modes import MODE_KEY, MODULES_KEY, ONE_FORWARD, RECORDED, REGISTRATION

RECORDING = (RECORDED, ONE_FORWARD)
STEPS, MOST, MOST_MIB = "trainer.record_steps", "trainer.record_max_mib", 2048
_SAVE, _KEPT = "trainer.save_freq", "trainer.max_actor_ckpt_to_keep"


def recorded_steps(config: Mapping[str, Any]) -> list[Any]:
    """Return the steps that a job records; empty if it names none."""
    return list(at(config, STEPS) or [])


def record_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a job cannot record the steps that it names.

    Args:
        config: resolved configuration of the whole job.
    """
    mode, modules = at(config, MODE_KEY), str(at(config, MODULES_KEY) or "").split(",")
    if mode == RECORDED and REGISTRATION not in modules:
        yield invalid(
            MODULES_KEY,
            at(config, MODULES_KEY),
            f"verl finds {MODE_KEY}={RECORDED} only through that module",
            REGISTRATION,
        )
    steps = recorded_steps(config)
    if not steps:
        return
    wrong = [step for step in steps if not isinstance(step, int) or isinstance(step, bool) or step < 1]
    if wrong:
        yield invalid(STEPS, steps, f"{wrong[0]} is not a step number, which is at least 1", "a list such as [3]")
        return
    most = at(config, MOST)
    if most is not None and (isinstance(most, bool) or not isinstance(most, int | float) or most <= 0):
        yield invalid(MOST, most, "not a size in MiB", f"a number above 0; the default is {MOST_MIB}")
    if mode not in RECORDING:
        yield invalid(
            STEPS, steps, f"the trainer {MODE_KEY}={mode} records nothing", f"[], or {MODE_KEY} to {RECORDED}"
        )
    every = at(config, _SAVE)
    for step in (step for step in steps if step > 1):
        if every <= 0 or (step - 1) % every:
            reason = f"no checkpoint has the weights at the beginning of step {step}, because {_SAVE} is {every}"
            yield invalid(STEPS, steps, reason, f"[1], or {_SAVE} to a divisor of {step - 1}")
            return
    if 1 not in steps and at(config, _KEPT) == 1:
        yield invalid(_KEPT, 1, f"{STEPS} needs the previous checkpoint, which verl deletes when it saves", "2 or null")
