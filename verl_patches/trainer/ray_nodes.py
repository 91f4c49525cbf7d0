"""The nodes of a Ray that the run has joined, and which of them it has lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from post_training.processes.descendants import wait_until

# Ray's head asks a node five times, and waits ten seconds for each answer, before the node counts as dead.
_NOTICED_S = 90.0
# Signs in the errors that Ray raises at once if a process of another node does not answer. If a process died on a node
# that still lives, the node reports the reason instead.
_MAY_BE_A_NODE = ("ActorUnavailableError", "NodeDiedError", "its node has died")

Listed = Callable[[], Sequence[Mapping[str, Any]]]


class RayNodes:
    """The nodes that are alive at construction; `listed` is `ray.nodes`."""

    def __init__(self, listed: Listed) -> None:
        self._listed = listed
        self._before = self._alive()

    def describe_loss(self, error: BaseException, seconds: float = _NOTICED_S) -> str | None:
        """Describe in one sentence that the run failed because Ray lost a node; None if it lost none.

        Ray raises before its head has noticed the loss, so after an error that a lost node may cause, this waits up to
        `seconds` for the head.
        """
        text = f"{type(error).__name__}: {error}"
        try:
            if any(sign in text for sign in _MAY_BE_A_NODE):
                wait_until(lambda: bool(self._lost()), seconds)
            lost = sorted(self._lost())
        except Exception:  # the head does not answer either, which the launcher reports
            return None
        if not lost:
            return None
        nodes = f"{'node' if len(lost) == 1 else 'nodes'} {', '.join(lost)}"
        return (
            f"Ray lost the {nodes} during the run. Was it switched off, or cut off from the network? Start its part "
            "and the run again"
        )

    def _lost(self) -> set[str]:
        alive = self._alive()
        return {address for node, address in self._before.items() if node not in alive}

    def _alive(self) -> dict[str, str]:
        return {each["NodeID"]: each["NodeManagerAddress"] for each in self._listed() if each["Alive"]}
