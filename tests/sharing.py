"""Which tests one process runs, where several share the tests: `--dist=loadfile` of `scripts/test.sh`.

pytest-xdist 3.8 finds its groups in node ids to which it has appended their names. pytest 9.2 computes node ids anew,
so without this every test would be handed out alone, and what a module sets up for its tests would be set up by each
process.

A process begins a test once it knows the next one, or that there is none. pytest-xdist hands out what a crashed process
leaves file by file as tests end: one test of one file, given to the process that replaces it, would wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController


class FileScheduling(LoadScopeScheduling):
    """The tests of a file stay together, and those of the folders in `together`, relative to pytest's root."""

    together: Sequence[str] = ()

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((folder for folder in self.together if file.startswith(f"{folder}/")), file)

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
