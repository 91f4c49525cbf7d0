"""On how many nodes a job starts, and when it goes back to more: decided from who is there and from the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from post_training.plan.fewer_nodes import Layout, Layouts

_POLL_S = 1.0


class NoLayout(Exception):
    """The nodes that are there cannot hold the job; the message is one sentence."""


class NodesReturned(Exception):
    """A checkpoint is complete since more nodes are there: the training starts again on them."""


@dataclass(frozen=True)
class Patience:
    """Seconds. wait_s: that a start waits for lost nodes. look_s: between two looks for returned ones."""

    wait_s: float
    look_s: float


class Elastic:
    """The nodes of one supervised job, on its head.

    Args:
        layouts: what the plan says with some overrides; raises ValueError where it rejects them.
        present: looks who is there.
        checkpoint: the step of the newest complete checkpoint, 0 where there is none.
        say: tells a sentence of a transition.
        wait: waits some seconds; raises where the job is to end.
        clock: seconds, from any beginning.
    """

    def __init__(
        self,
        layouts: Callable[[tuple[str, ...]], Layouts],
        present: Callable[[], Collection[str]],
        checkpoint: Callable[[], int],
        patience: Patience,
        say: Callable[[str], None],
        wait: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._present, self._checkpoint = layouts, present, checkpoint
        self._patience, self._say, self._wait, self._clock = patience, say, wait, clock
        self._layouts = layouts(())
        self._planned_with: tuple[str, ...] = ()
        self._looked_at = self._asked_at = clock()
        self._waiting_from: int | None = None
        self.current = self._configured()

    @property
    def configured(self) -> int:
        """Nodes that the job has when all are there."""
        return self._layouts.configured

    @property
    def fewer(self) -> Layout | None:
        """The layout of the present start; None where it is the configured one."""
        return self.current if self.current.nodes < self.configured else None

    def facts(self) -> dict[str, int | str]:
        """What the record says of a start: its nodes, its layout, and the step that it goes on from."""
        return {
            "nodes": self.current.nodes,
            "of_nodes": self.configured,
            "layout": self.current.text,
            "from_step": self._checkpoint(),
        }

    def describe(self) -> str:
        """What the job can go on with, as a clause."""
        found = [f"{layout.nodes} ({layout.text})" for layout in self._layouts.fitting]
        possible = f"it can go on with {', '.join(found)}" if found else "it can go on with no fewer"
        return f"of {self.configured} nodes {possible}{self._shortage() if self._layouts.short else ''}"

    def choose(self, overrides: Sequence[str]) -> Layout:
        """The layout of the next start, once all nodes are there or the wait for them is over.

        Args:
            overrides: those of the supervisor's own, as smaller micro batches.

        Raises:
            NoLayout: the nodes that are there cannot hold the job.
        """
        self._plan_again(tuple(overrides))
        begun, told, there = self._clock(), False, self._count()
        while there < self.configured and (left := self._patience.wait_s - (self._clock() - begun)) > 0:
            if not told:
                self._say(f"{there} of {self.configured} nodes are there; waiting up to {self._patience.wait_s:g} s")
                told = True
            self._wait(min(left, _POLL_S))
            there = self._count()
        layout = self._largest(there)
        if layout is None:
            raise NoLayout(f"{there} of {self.configured} nodes are there, which cannot hold the job{self._shortage()}")
        if layout.nodes < self.configured:
            self._say(
                f"{there} of {self.configured} nodes are there: it goes on with {layout.nodes}, {layout.text}; the "
                "batches of a step stay as they are"
            )
        elif self.current.nodes < self.configured:
            self._say(f"all {self.configured} nodes are there: it goes on as configured")
        self.current, self._waiting_from = layout, None
        self._looked_at = self._clock()
        return layout

    def check_returned(self) -> None:
        """Look for returned nodes, as often as it is time to; call it while the training runs.

        Raises:
            NodesReturned: a larger layout fits, and a checkpoint was completed since that was seen.
        """
        if self.current.nodes >= self.configured:
            return
        now = self._clock()
        if now - self._looked_at >= self._patience.look_s:
            self._looked_at = now
            self._look(self._count())
        if self._waiting_from is not None and now - self._asked_at >= _POLL_S:
            self._asked_at = now
            if (step := self._checkpoint()) > self._waiting_from:
                raise NodesReturned(f"the checkpoint of step {step} is complete, and more nodes are there")

    def _look(self, there: int) -> None:
        layout = self._largest(there)
        larger = layout is not None and layout.nodes > self.current.nodes
        if layout and larger and self._waiting_from is None:
            self._waiting_from = self._checkpoint()
            self._say(
                f"{there} of {self.configured} nodes are there: the training goes back to {layout.nodes} at its next "
                "checkpoint"
            )
        elif not larger and self._waiting_from is not None:
            self._waiting_from = None
            self._say(f"{there} of {self.configured} nodes are there: it stays on {self.current.nodes}")

    def _count(self) -> int:
        return min(len(self._present()), self.configured)

    def _configured(self) -> Layout:
        return Layout(self._layouts.configured, "as configured")

    def _largest(self, there: int) -> Layout | None:
        """The layout on most of the nodes that are there. What the job was configured for is not held against the plan:
        it is its user's choice."""
        every = [self._configured(), *self._layouts.fitting]
        return next((layout for layout in every if layout.nodes <= there), None)

    def _shortage(self) -> str:
        """Why fewer cannot hold it, as the end of a sentence: of the smallest number that was planned."""
        if not self._layouts.short:
            return f"; --min-nodes is {self._layouts.least}"
        nodes = min(self._layouts.short)
        return f"; {nodes} cannot: {self._layouts.short[nodes]}"

    def _plan_again(self, overrides: tuple[str, ...]) -> None:
        if overrides == self._planned_with:
            return
        try:
            self._layouts, self._planned_with = self._plan(overrides), overrides
        except ValueError as error:
            raise NoLayout(f"with {' '.join(overrides)} no layout is known: {error}") from error
