"""Start a training, and restart it after failures until it ends or is given up."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from post_training.processes.command import Interrupted, SignalFlag
from post_training.processes.descendants import wait_until
from post_training.recovery.causes import RAY_ENDED
from post_training.recovery.decision import Again, Supervision
from post_training.report.heartbeat import read_progress
from post_training.report.metrics import read_entries
from post_training.report.nodes import SUPERVISION
from scripts.supervision.elastic import Elastic, NodesReturned, NoLayout
from scripts.supervision.failure import failed_attempt, write_bundle
from scripts.supervision.run import SupervisedRun, as_words
from scripts.supervision.start import Silence, Start

SIGNALLED = 128
"""An exit code above this names the signal that ended the command."""
# Seconds that a node that gives its dies to another node's training waits after a start for the decision of that
# training's supervisor.
_DECIDED_S = 60.0


class Supervisor:
    """The supervisor of one node.

    Args:
        run: The run that it starts.
        supervision: Decides after a failure.
        silent_after: Seconds without output and progress after which a training counts as hung.
        signals: Those that ask this command to end.
        elastic: Chooses the nodes of a start; None if a job always has all its nodes.
    """

    def __init__(
        self,
        run: SupervisedRun,
        supervision: Supervision,
        silent_after: float,
        signals: SignalFlag,
        elastic: Elastic | None = None,
    ) -> None:
        self._run, self._supervision, self._silent_after = run, supervision, silent_after
        self._signals, self._elastic = signals, elastic
        self._head = _Head(run)

    def supervise(self) -> int:
        """Start the training, restart it after failures, and return the exit code.

        Raises:
            Interrupted: one of the signals was received.
        """
        overrides: Mapping[str, int | float] = {}
        while True:
            full_disk = self._run.full_disk()
            if full_disk:
                print(f"error: {full_disk}", file=sys.stderr)
                return 1
            start = None
            try:
                if self._elastic:
                    self._elastic.choose(as_words(overrides))
                start = Start.begin(self._run.folder)
                followed = self._start_once(start, overrides)
                if isinstance(followed, int):
                    return followed
                overrides = followed.overrides
                wait(followed.wait_s, self._signals)
            except NoLayout as error:
                self._run.record(f"it is not started again: {error}", ended=1)
                return 1
            except Interrupted as interrupted:
                code = SIGNALLED + interrupted.number
                end = start.end(code) if start else {"ended": code}
                self._run.record("interrupted; all processes have been stopped", **end)
                raise

    def _start_once(self, start: Start, overrides: Mapping[str, int | float]) -> int | Again:
        """Start the training once. Return the exit code if this was the last start."""
        nodes = self._elastic.facts() if self._elastic else {}
        log = start.log
        self._run.record(f"starting; output is in {log}", start=log.name, overrides=dict(overrides), **nodes)
        command = self._run.command(overrides, self._elastic.fewer if self._elastic else None)
        check = self._elastic.check_returned if self._elastic else lambda: None
        silence = Silence(partial(read_progress, self._run.folder))
        try:
            code = start.run(command, self._signals, silence, self._silent_after, check)
        except NodesReturned as returned:
            self._run.record(f"{returned}; starting again from there", again_s=0, after="nodes_returned")
            return Again(0, overrides)
        if start.is_worker:
            followed = self._as_the_head_decides(code, overrides)
            if followed is not None:
                return followed
        if code == 0:
            self._run.record("the training is complete", **start.end(0))
            return 0
        return self._after_failure(start, code)

    def _as_the_head_decides(self, code: int | None, overrides: Mapping[str, int | float]) -> int | Again | None:
        """Return what follows on a node that gives its dies to another's training; None if it failed by itself."""
        # Ray here ends with the head's. The head's next one may answer before the launcher has checked which it was.
        with_heads_ray = code in (0, RAY_ENDED)
        decided = self._head.decision(_DECIDED_S if with_heads_ray else 0, self._signals)
        ended = decided.get("ended")
        if ended is not None:
            self._run.record(f"the head's supervisor ended the training with {ended}", code=code)
            return int(ended)
        if code == 0 or (with_heads_ray and decided):
            self._run.record("the head ended this start, but not the training; starting again", code=code)
            return Again(0, overrides)
        return None

    def _after_failure(self, start: Start, code: int | None) -> int | Again:
        """Record the failure and what follows. Return the exit code if the training is not restarted.

        `code` is the exit status; None if the training hung.
        """
        hang = None if code is not None else f"no output and no progress of any rank for {self._silent_after:g} s"
        nodes = self._elastic.current.nodes if self._elastic else None
        attempt = failed_attempt(self._run, start, code or 1, hang, nodes)
        failure, decided = attempt.failure, self._supervision.decide(attempt)
        facts = {"code": code, "cause": failure.cause, "stage": failure.stage, "step": attempt.step}
        sentence = f"it failed ({failure.cause}): {failure.sentence}"
        self._run.record(sentence, phase=start.status.phase, **facts)
        if not isinstance(decided, Again):
            kept, ended = write_bundle(self._run, start), _exit_code(code)
            # The supervisors of the run that owns the folder must not mistake this for their end.
            end = {"left": ended} if failure.cause == "in_use" else start.end(ended)
            self._run.record(f"it is not started again: {decided.reason}; {kept}", **end)
            return ended
        settings = " ".join(as_words(decided.overrides))
        place = f"from the checkpoint of step {attempt.checkpoint}" if attempt.checkpoint else "from the beginning"
        again = {} if start.is_worker else {"again_s": decided.wait_s, "after": failure.cause}
        sentence = f"again in {decided.wait_s:g} s {place}{' with ' + settings if settings else ''}"
        self._run.record(sentence, **again)
        return decided


class _Head:
    """The decisions that the head's supervisor writes into the record of all nodes from now on."""

    def __init__(self, run: SupervisedRun) -> None:
        self._file = run.folder / SUPERVISION
        self._read = len(read_entries(self._file))

    def decision(self, seconds: float, signals: SignalFlag) -> dict[str, Any]:
        """Return its newest decision: `ended`, the exit code of the whole training, or `again_s`; empty if none is made
        within `seconds`."""
        wait_until(lambda: bool(signals.received or self._decisions()), seconds)
        if signals.received:
            raise Interrupted(signals.received[0])
        last = self._decisions()[-1:]
        self._read = len(read_entries(self._file))
        return last[0] if last else {}

    def _decisions(self) -> list[dict[str, Any]]:
        return [each for each in read_entries(self._file)[self._read :] if "ended" in each or "again_s" in each]


def wait(seconds: float, signals: SignalFlag) -> None:
    """Wait for some seconds; raise Interrupted if a signal is received."""
    wait_until(lambda: bool(signals.received), seconds)
    if signals.received:
        raise Interrupted(signals.received[0])


def _exit_code(code: int | None) -> int:
    """Return this command's exit code: that of a rejection or a requested end as it is, 1 for any other failure."""
    return code if code in (2, 129, 130, 131, 143) else 1
