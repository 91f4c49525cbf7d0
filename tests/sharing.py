"""Distribution of tests over parallel processes: `--dist=loadfile` of `scripts/test.sh`.

pytest-xdist 3.8 appends group names to node ids and reads them back from there. pytest 9.2 recomputes node ids, so
without this module every test would be distributed separately, and each process would repeat a module's fixtures.

A process starts a test only once it knows the next one, or that there is none. pytest-xdist hands out the remaining
tests of a crashed process file by file as tests end, so a file's single test, given to the replacement process, would
wait forever.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController


class FileScheduling(LoadScopeScheduling):
    """Scheduler that keeps together the tests of each file, and of each folder in `together`, relative to the root."""

    together: Sequence[str] = ()

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((folder for folder in self.together if file.startswith(f"{folder}/")), file)

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
