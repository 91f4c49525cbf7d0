"""For a machine with fewer cores than a run has processes: how processes of vLLM and verl wait for each other.

Importing this changes vLLM and verl in this process and in those that are forked from it. A reader of vLLM's shared
memory asks for a second after every message whether there is another one, and takes a whole core for it: on a server
that saves microseconds, and here it takes the core from whoever is to write the message. So it sleeps at once.

Then every wake-up counts, and vLLM's writer loses some. Its socket holds one message, and ZeroMQ looks only every
millisecond whether that has gone. A message sent before then is dropped, and its reader sleeps on: five seconds with
vLLM-Ascend. So the writer looks each time. Messages sent before a reader has subscribed are still lost, so a reader
looks again after half a second.
"""

from typing import Any

import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm_ascend.patch.platform import patch_shm_broadcast

_LOOK_AGAIN_MS = 500


class SleepingCondition(shm_broadcast.SpinCondition):
    """vLLM's condition, of which readers sleep at once and writers wake every one."""

    local_notify_socket: zmq.Socket

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named, busy_loop_s=0.0)

    def notify(self) -> None:
        """Wake the readers: to ask for a socket's events is what makes ZeroMQ look."""
        self.local_notify_socket.getsockopt(zmq.EVENTS)
        super().notify()


shm_broadcast.SpinCondition = SleepingCondition
patch_shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = _LOOK_AGAIN_MS
