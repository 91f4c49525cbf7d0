"""Moves requests between the engines of an instance at the end of a window, and returns their results at the very end.

Every rank derives from the agreement alone how many requests move from where to where, if any
(`post_training.plan.rebalance`). An engine itself decides which of its requests these are. Requests travel in one
exchange of bytes, after an exchange of sizes; so do results, once, when no rank has unfinished requests any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from post_training.plan.rebalance import Move, rebalance
from post_training.process_context import process_context
from verl_patches.features.dp_sync.agreement import total
from verl_patches.features.dp_sync.decode_loop import DecodeLoop
from verl_patches.features.dp_sync.sync_window import ReducedState
from verl_patches.features.measure.step_record import current_record
from verl_patches.features.rollout_rebalance.requests import (
    FinishedRequest,
    MovingRequest,
    Sampled,
    arriving_request,
    decoded,
    encoded,
    joined,
    output_of,
    parameters_left,
)


@dataclass(frozen=True)
class MigratedRequest:
    """A request of another rank, or one of this rank's own that has come back, while it runs here."""

    home: int
    home_id: str
    sampled: Sampled
    outputs: list[Any] = field(default_factory=list)


class RequestMigration:
    """One rank's side of request migration."""

    def __init__(self, loop: DecodeLoop) -> None:
        self.loop = loop
        self.migrated_in: dict[str, MigratedRequest] = {}
        self.migrated_out: set[str] = set()
        self._moved = self._moved_bytes = 0
        self._due: list[Move] = []
        self._any_moved = False
        self._arrived: list[Any] = []
        self._stepping = False
        self._generators: dict[str, bytes] = {}

    # Called by the decode loop.

    def plan(self, agreed: ReducedState, graph_sizes: Sequence[int]) -> bool:
        """Return whether requests move after the forward that has just been agreed on; the same on all ranks."""
        if agreed.with_prefill or agreed.waiting or not graph_sizes:
            return False
        self._due = rebalance(agreed.running, graph_sizes, agreed.headroom)
        return bool(self._due)

    def ended(self) -> None:
        """Send results home and count the moves; called when no rank has unfinished requests.

        Collective: one all-reduce, and an exchange if anything moved.
        """
        if self._any_moved:
            results: list[list[FinishedRequest]] = [[] for _ in range(self.loop.group.world_size)]
            for migrated in self.migrated_in.values():
                results[migrated.home].append(
                    FinishedRequest(migrated.home_id, joined(migrated.outputs, migrated.sampled))
                )
            self._arrived = [output_of(each) for each in self._exchanged(results, FinishedRequest)]
            self.migrated_out.difference_update(output.request_id for output in self._arrived)
        self.migrated_in.clear()
        # Counted after every rollout, even without moves, so that all ranks have the same metrics.
        (moved,) = total([self._moved], self.loop.group.device_group)
        current_record().count("rollout/moved_requests", moved)
        current_record().count("rollout/moved_bytes", self._moved_bytes)
        self._moved = self._moved_bytes = 0

    # Called by the engine's patches.

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Mark a step of the engine core within this context."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def has_work(self, core: Any) -> bool:
        """Return whether the engine, without requests of its own, must make a step for requests of other engines."""
        return not self._stepping and core.scheduler.has_requests()

    def move(self, core: Any) -> None:
        """Carry out the moves that the last agreement decided, before anything is scheduled under the next."""
        if self.loop.window.agreement is None:
            self.migrated_in.clear()
            self.migrated_out.clear()
            self._due, self._any_moved = [], False
            self._moved = self._moved_bytes = 0
        if not self._due or self.loop.window.left:
            return
        planned, self._due, self._any_moved = self._due, [], True
        leaving: list[list[MovingRequest]] = [[] for _ in range(self.loop.group.world_size)]
        for each in planned:
            if each.source == self.loop.group.rank_in_group:
                leaving[each.target].extend(self._taken(core, each.sequences))
        for arrived in self._exchanged(leaving, MovingRequest):
            self._take_in(core, arrived)

    def own_outputs(self, core: Any, outputs: dict[int, Any]) -> dict[int, Any]:
        """Return a step's outputs of this engine's own requests, with results that came home; store migrated ones'."""
        from vllm.v1.engine import EngineCoreOutputs

        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.request_id in self.migrated_in:
                    self.migrated_in[output.request_id].outputs.append(output)
            of_client.outputs = [each for each in of_client.outputs if each.request_id not in self.migrated_in]
        arrived, self._arrived = self._arrived, []
        if arrived:
            outputs.setdefault(0, EngineCoreOutputs(scheduler_stats=core.scheduler.make_stats()))
            outputs[0].outputs = [*outputs[0].outputs, *arrived]
        return outputs

    def restore_generators(self, runner: Any, scheduled: Any) -> None:
        """Restore the random states of requests that have arrived.

        Args:
            runner: the model runner.
            scheduled: vLLM's scheduler output, from which the runner has just made their generators.
        """
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in self._generators:
                content = bytearray(self._generators.pop(new.req_id))
                runner.requests[new.req_id].generator.set_state(torch.frombuffer(content, dtype=torch.uint8))

    def _taken(self, core: Any, number: int) -> list[MovingRequest]:
        """Remove and return the `number` requests of the engine with the fewest tokens."""
        shortest = sorted(core.scheduler.running, key=lambda request: request.num_tokens)[:number]
        return [self._sent(core, request) for request in shortest]

    def _sent(self, core: Any, request: Any) -> MovingRequest:
        from vllm.v1.request import RequestStatus

        generator = _runner(core).requests[request.request_id].generator
        migrated = self.migrated_in.pop(request.request_id, None)
        if migrated is None:
            self.migrated_out.add(request.request_id)
            migrated = MigratedRequest(self.loop.group.rank_in_group, request.request_id, Sampled([], [], [], []))
        core.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self._moved += 1
        return MovingRequest(
            home=migrated.home,
            home_id=migrated.home_id,
            tokens=list(request.all_token_ids),
            params=parameters_left(request),
            end_token=request.eos_token_id,
            generator=None if generator is None else generator.get_state().cpu().numpy().tobytes(),
            sampled=joined(migrated.outputs, migrated.sampled),
        )

    def _take_in(self, core: Any, moving: MovingRequest) -> None:
        request_id = f"{moving.home_id}@{moving.home}"
        self.migrated_in[request_id] = MigratedRequest(moving.home, moving.home_id, moving.sampled)
        if moving.generator is not None:
            self._generators[request_id] = moving.generator
        core.add_request(arriving_request(moving, request_id))

    def _exchanged(self, items: Sequence[Sequence[Any]], kind: type[Any]) -> list[Any]:
        """Exchange items between all ranks; return those for this rank, by sender. Collective: two all-to-alls.

        Args:
            items: this rank's items for each rank.
            kind: the type of the items.
        """
        outgoing = [encoded(of_rank) for of_rank in items]
        group = self.loop.group.device_group
        sizes = torch.tensor([len(content) for content in outgoing], dtype=torch.int32).npu()
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes, group=group)
        received = arriving.tolist()
        content = torch.frombuffer(bytearray(b"".join(outgoing) or b"\0"), dtype=torch.uint8)[: int(sizes.sum())].npu()
        incoming = torch.empty(sum(received), dtype=torch.uint8).npu()
        dist.all_to_all_single(incoming, content, received, sizes.tolist(), group=group)
        self._moved_bytes += incoming.numel()
        parts = incoming.cpu().split(received)
        return [each for part in parts for each in decoded(part.numpy().tobytes(), kind)]


def _runner(core: Any) -> Any:
    return core.model_executor.driver_worker.worker.model_runner


@contextmanager
def migration_of(loop: DecodeLoop) -> Iterator[RequestMigration]:
    """Attach the migration of this process's engine to its decode loop within this context."""
    migration = process_context().find(RequestMigration)
    if migration is None or migration.loop is not loop:
        migration = process_context().keep(RequestMigration(loop))
    before, loop.migration = loop.migration, migration
    try:
        yield migration
    finally:
        loop.migration = before


def restore_generators(runner: Any, scheduled: Any) -> None:
    """Call `RequestMigration.restore_generators`, if this process has a migration."""
    migration = process_context().find(RequestMigration)
    if migration is not None:
        migration.restore_generators(runner, scheduled)
