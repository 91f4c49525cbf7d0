"""Lets vLLM and verl wait and hand samples on cheaply, for machines with fewer cores than a run has processes.

Importing this changes vLLM and verl in this process and in those that are forked from it. After every message, a reader
of vLLM's shared memory polls for a second for the next one and takes a whole core. On a server that saves microseconds;
here it takes the core from the process that is to write the message. So the reader sleeps at once.

Then every wake-up counts, and vLLM's writer loses some. Its socket holds one message, and ZeroMQ checks only every
millisecond whether that has gone. A message sent before then is dropped, and its reader sleeps on: five seconds with
vLLM-Ascend. So the writer checks each time. Messages sent before a reader has subscribed are still lost, so a reader
looks again after half a second. (vLLM's pull request 45224 and vLLM-Ascend's 14181 look again after five.)

verl's agent loop hands each finished answer to TransferQueue in three requests, each with sockets and threads of its
own (docs/upstream/transfer-queue-request-sockets.md). An answer takes 8 ms of a core, but 3 ms if eight answers share a
request. So answers that end while others are being sent go together.

verl's engine of Megatron-core pads three tensors in each pass, sample by sample: 37 ms of a core for 64 samples, and
3 ms if they are split into samples once.

When vLLM's engine and its worker end, they undo `gc.freeze` and search every imported object for garbage. That would
copy all pages that forked processes share. So what is frozen stays so.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from verl.models.mcore import model_forward
from verl.trainer.ppo.v1 import agent_loop_tq
from vllm.distributed.device_communicators import shm_broadcast
from vllm_ascend.patch.platform import patch_shm_broadcast

from verl_plugin.routing_replay.samples import TakenApart

_LOOK_AGAIN_MS = 500


class SleepingCondition(shm_broadcast.SpinCondition):
    """vLLM's condition, with readers that sleep at once and writers that wake all of them."""

    local_notify_socket: zmq.Socket

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named, busy_loop_s=0.0)

    def notify(self) -> None:
        """Wake the readers; asking for the socket's events makes ZeroMQ check it."""
        self.local_notify_socket.getsockopt(zmq.EVENTS)
        super().notify()


@dataclass(frozen=True)
class _Waiting:
    """Answers to hand over; `done` is set when TransferQueue has them."""

    partition: str
    keys: Sequence[str]
    fields: Sequence[dict[str, Any]]
    tags: Sequence[dict[str, Any]]
    done: asyncio.Future[None]

    def goes_with(self, other: "_Waiting") -> bool:
        """Whether both fit into one request."""
        return self.partition == other.partition and self.fields[0].keys() == other.fields[0].keys()


class GroupedPuts:
    """Hands answers of an event loop to TransferQueue, one request at a time with all waiting answers.

    Args:
        put: TransferQueue's `async_kv_batch_put`.
        joined: makes one batch of the fields of several answers.
    """

    def __init__(self, put: Callable[..., Awaitable[Any]], joined: Callable[[list[dict[str, Any]]], Any]) -> None:
        self._put, self._joined = put, joined
        self._waiting: list[_Waiting] = []
        self._sending = False

    async def put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Sequence[dict[str, Any]],
        tags: Sequence[dict[str, Any]],
    ) -> None:
        """Return when TransferQueue has these answers."""
        own = _Waiting(partition_id, keys, fields, tags, asyncio.get_running_loop().create_future())
        self._waiting.append(own)
        if not self._sending:
            self._sending = True
            try:
                while self._waiting:
                    await self._send()
            finally:
                self._sending = False
        await own.done

    async def _send(self) -> None:
        first = self._waiting[0]
        group = [each for each in self._waiting if each.goes_with(first)]
        self._waiting = [each for each in self._waiting if not each.goes_with(first)]
        try:
            await self._put(
                keys=[key for each in group for key in each.keys],
                partition_id=first.partition,
                fields=self._joined([field for each in group for field in each.fields]),
                tags=[tag for each in group for tag in each.tags],
            )
        except Exception as error:  # each answer's own task reports it
            for each in group:
                each.done.set_exception(error)
        else:
            for each in group:
                each.done.set_result(None)


class _GroupingQueue:
    """TransferQueue's module as verl's agent loops use it, with `GroupedPuts`.

    Ray pickles the class of verl's worker with everything that its code names, and the functions of that module cannot
    be pickled. So this object is pickled as a reference to the one of the receiving process.
    """

    def __init__(self, upstream: Any, grouped: GroupedPuts) -> None:
        self.__dict__ |= vars(upstream) | {"async_kv_batch_put": grouped.put}

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _queue_of_process, ()


def _queue_of_process() -> Any:
    return agent_loop_tq.tq


def _group_answers() -> None:
    grouped = GroupedPuts(agent_loop_tq.tq.async_kv_batch_put, agent_loop_tq.list_of_dict_to_tensordict)
    agent_loop_tq.tq = _GroupingQueue(agent_loop_tq.tq, grouped)
    agent_loop_tq.list_of_dict_to_tensordict = list  # of which `GroupedPuts` makes one batch


def _pad_at_once() -> None:
    upstream = model_forward.preprocess_bshd_engine

    def padded(input_ids: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        return upstream(TakenApart(input_ids), *arguments, **named)

    model_forward.preprocess_bshd_engine = padded


shm_broadcast.SpinCondition = SleepingCondition
patch_shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = _LOOK_AGAIN_MS
_group_answers()
_pad_at_once()
gc.unfreeze = lambda: None
