"""Decide on how many nodes a job starts, and when it returns to more, from the nodes present and from the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from post_training.plan.fewer_nodes import Layout, Layouts

_POLL_S = 1.0


class NoLayout(Exception):
    """The nodes present cannot run the job; the message is one sentence."""


class NodesReturned(Exception):
    """More nodes are present, and a checkpoint was completed since then: the training restarts on them."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for nodes.

    Attributes:
        wait_s: seconds that a start waits for lost nodes.
        look_s: seconds between two looks for returned nodes.
    """

    wait_s: float
    look_s: float


class Elastic:
    """The nodes of one supervised job, on its head.

    Args:
        layouts: returns the plan's layouts with some overrides; raises ValueError if it rejects them.
        present: returns the nodes that are present.
        checkpoint: returns the step of the newest complete checkpoint, 0 if there is none.
        patience: how long to wait for nodes.
        say: reports a transition in one sentence.
        wait: waits some seconds; raises if the job is to end.
        clock: returns seconds since an arbitrary moment.
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
        """Number of nodes that the job has if all are present."""
        return self._layouts.configured

    @property
    def fewer(self) -> Layout | None:
        """The layout of the current start; None if it is the configured one."""
        return self.current if self.current.nodes < self.configured else None

    def facts(self) -> dict[str, int | str]:
        """Return the record's facts about a start: its nodes, its layout, and the step from which it continues."""
        return {
            "nodes": self.current.nodes,
            "of_nodes": self.configured,
            "layout": self.current.text,
            "from_step": self._checkpoint(),
        }

    def describe(self) -> str:
        """Describe the numbers of nodes on which the job can continue, as a clause."""
        found = [f"{layout.nodes} ({layout.text})" for layout in self._layouts.fitting]
        possible = f"it can continue with {', '.join(found)}" if found else "it cannot continue with fewer"
        return f"of {self.configured} nodes {possible}{self._shortage() if self._layouts.short else ''}"

    def choose(self, overrides: Sequence[str]) -> Layout:
        """Return the layout of the next start, once all nodes are present or the wait for them is over.

        Args:
            overrides: the supervisor's own, such as smaller micro batches.

        Raises:
            NoLayout: the nodes present cannot run the job.
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
            raise NoLayout(f"{there} of {self.configured} nodes are there, too few for the job{self._shortage()}")
        if layout.nodes < self.configured:
            self._say(
                f"{there} of {self.configured} nodes are there: it continues with {layout.nodes}, {layout.text}; the "
                "batches of a step stay the same"
            )
        elif self.current.nodes < self.configured:
            self._say(f"all {self.configured} nodes are there: it continues as configured")
        self.current, self._waiting_from = layout, None
        self._looked_at = self._clock()
        return layout

    def check_returned(self) -> None:
        """Look for returned nodes every `look_s` seconds; call it while the training runs.

        Raises:
            NodesReturned: a larger layout fits, and a checkpoint was completed since that was noticed.
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
        """Return the layout that uses the most of the nodes present. The configured layout is not checked against the
        plan: it is the user's choice."""
        every = [self._configured(), *self._layouts.fitting]
        return next((layout for layout in every if layout.nodes <= there), None)

    def _shortage(self) -> str:
        """Say why fewer nodes cannot run the job, for the smallest number planned, as the end of a sentence."""
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
