"""Kills a job of the stack 2026, scaled down to emulated dies, resumes it, and compares it with the unbroken run.

    python -m rehearsal.stack_2026.resume_proof --job NAME --output DIR -- KEY=VALUE ...

The command is killed by SIGKILL after the last step was saved and before it is complete, so that the step before it is
resumed. Metrics of every step, weights, optimizer and schedule then have to be those of the unbroken run. Metrics of
the rollout's log-probs may differ by 1e-3, those of one token or answer by 1e-2: vLLM batches requests as they arrive,
and a matrix product may round differently with another number of rows, in two unbroken runs too.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from post_training.arguments import absolute
from post_training.command_parser import CommandParser
from post_training.masking import masked_output
from post_training.processes.command import Interrupted, SignalFlag, run_to_the_end
from post_training.processes.descendants import descendants, send
from post_training.processes.logs import last_error
from post_training.terminal import escape_output
from rehearsal.kept_options import OPTIONS_NAME
from rehearsal.plan import ROOT
from rehearsal.resume_proof.comparison import Comparison, compare_metrics
from rehearsal.resume_proof.runs import ProofError
from rehearsal.stack_2026.jobs import JOBS
from verl_plugin.resume.checks import KEYS

STEPS = 2
REACHED_NAME = "held"
"""Beside the folders of the steps: the training loop is held in the save of the last one."""
LOG_PROB_METRICS = ("rollout_corr/", "training/rollout_")
"""Prefixes of metrics that compare the rollout's log-probs with training's. No job here trains with the rollout's."""
LOG_PROB_TOLERANCE = 1e-3
EXTREMES = ("_max", "_min")
"""Ends of metrics that a single token or answer decides, so that its rounding is not averaged: a step of bfloat16 is
4e-3 just below 1."""
EXTREME_TOLERANCE = 1e-2
_CALLBACK = "trainer.checkpoint_callback_class"
_HELD = f"{_CALLBACK}=rehearsal.stack_2026.held_save.HeldSave"
_COMPLETE = f"{_CALLBACK}={KEYS[_CALLBACK]}"
_TRAINING = b"rehearsal.stack_2026.training"
# Seconds that one run may take, on a machine that does other work too.
_LIMIT_S = 900.0


@dataclass(frozen=True)
class Proof:
    """A job of `JOBS` with overrides, and the folder of its runs `unbroken` and `killed`.

    ``options`` are further ones of the rehearsal's command.
    """

    job: str
    overrides: tuple[str, ...]
    folder: Path
    options: tuple[str, ...] = ()

    def carry_out(self, signals: SignalFlag) -> Comparison:
        """Train, train again and kill, resume, and compare.

        Raises:
            Interrupted: a signal ended it.
            ProofError: a run failed, or the one to be killed did not come to its save.
        """
        unbroken, killed = (self._empty(name) for name in ("unbroken", "killed"))
        if status := self._run("unbroken", self._command(unbroken), signals):
            raise self._error("unbroken", f"the unbroken run ended with {status}")
        reached = killed / "checkpoints" / REACHED_NAME
        status = self._run("killed", self._command(killed, _HELD), signals, lambda: _kill_at(reached))
        if not reached.is_file() or status == 0:
            raise self._error("killed", f"the run to be killed ended with {status}, and was not killed in its save")
        resume = [*_REHEARSAL, "--resume", str(killed), "--", _COMPLETE]
        if status := self._run("resumed", resume, signals):
            raise self._error("resumed", f"the resumed run ended with {status}")
        return compare(unbroken, killed)

    def _command(self, output: Path, *more: str) -> list[str]:
        own = ["trainer.save_freq=1", *more]
        start = [*_REHEARSAL, "--job", self.job, *self.options, "--steps", str(STEPS), "--output", str(output)]
        return [*start, "--", *self.overrides, *own]

    def _run(
        self, name: str, command: Sequence[str], signals: SignalFlag, while_running: Callable[[], None] = lambda: None
    ) -> int:
        until = time.monotonic() + _LIMIT_S

        def watch() -> None:
            while_running()
            if time.monotonic() > until:
                raise self._error(name, f"the {name} run did not finish within {_LIMIT_S:.0f} s")

        return run_to_the_end(command, {}, ROOT, self._file(name), signals, check=watch)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _error(self, name: str, sentence: str) -> ProofError:
        """Return the error of a failed run, with the last error of its log."""
        log = self._file(name)
        return ProofError(f"{sentence}; {last_error(log)}", log)

    def _empty(self, name: str) -> Path:
        """Return the folder of a run, after removing one of an earlier proof."""
        folder = self.folder / name
        if (folder / OPTIONS_NAME).is_file():
            shutil.rmtree(folder)
        self._file(name).unlink(missing_ok=True)
        return folder


_REHEARSAL = (sys.executable, "-m", "rehearsal.stack_2026")


def compare(unbroken: Path, resumed: Path) -> Comparison:
    """Compare the metrics of every step of two runs, and the state that they saved of the last."""
    from rehearsal.stack_2026.saved_state import digests_of

    steps, count, differing = compare_metrics(unbroken, resumed, _agree)
    one, other = (digests_of(run / "checkpoints" / f"global_step_{STEPS}") for run in (unbroken, resumed))
    if not one:
        differing.append(f"nothing was saved of step {STEPS}")
    files = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    differing += [f"{name} of step {STEPS}" for name in files]
    if one == digests_of(unbroken / "checkpoints" / f"global_step_{STEPS - 1}"):
        differing.append("the last step changed nothing, so a resume proves nothing")
    return Comparison(steps, count, tuple(differing))


def _agree(name: str, ours: Any, theirs: Any) -> bool:
    """Whether a metric is the same in both runs, or of the rollout's log-probs and within the tolerance."""
    if ours is None or theirs is None or not name.startswith(LOG_PROB_METRICS):
        return bool(ours == theirs)
    tolerance = EXTREME_TOLERANCE if name.endswith(EXTREMES) else LOG_PROB_TOLERANCE
    return bool(ours == theirs or abs(ours - theirs) <= tolerance)


def _kill_at(reached: Path) -> None:
    """Kill all processes of the training that is held, once the file `reached` exists; the file stays."""
    if not reached.is_file():
        return
    for process in descendants(os.getpid()):
        try:
            line = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            continue
        if _TRAINING in line:
            for each in (process, *descendants(process)):
                send(each, signal.SIGKILL)
            return


def main(arguments: Sequence[str] | None = None) -> int:
    """Proves; returns the exit code: 0 everything is equal, 1 something differs or a run failed."""
    parser = CommandParser(prog="python -m rehearsal.stack_2026.resume_proof", description=__doc__)
    parser.add_argument("--job", choices=JOBS, required=True, metavar="NAME", help="a job of verl_plugin/config")
    parser.add_argument("--output", type=absolute, required=True, metavar="DIR", help="folder to write")
    parser.add_overrides("Hydra overrides, as for the training")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        with SignalFlag() as signals:
            found = Proof(options.job, tuple(options.overrides), options.output).carry_out(signals)
    except ProofError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"error: {interrupted} ended the proof; everything it started has been stopped", file=sys.stderr)
        return 128 + interrupted.number
    steps = f"killed in the save of step {STEPS}, resumed after step {STEPS - 1}"
    print(f"{steps}: {found.metrics} metrics of {found.steps} steps, {len(found.differing)} differences")
    for each in found.differing:
        print(f"error: {each} differs from the unbroken run", file=sys.stderr)
    return int(bool(found.differing))


if __name__ == "__main__":
    escape_output()
    with masked_output():
        sys.exit(main())
