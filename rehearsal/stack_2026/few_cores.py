"""For a machine with fewer cores than a run has processes: how vLLM's readers of messages wait.

Importing this changes vLLM in this process and in those that are forked from it. A reader of vLLM's shared memory asks
for a second after every message whether there is another one, and takes a whole core for it: on a server that saves
microseconds, and here it takes the core from whoever is to write the message. So it sleeps at once. A reader that
misses its wake-up looks again after five seconds in vLLM-Ascend, and steps of the rehearsal waited for that several
times; here it looks again after ten milliseconds.
"""

import functools

from vllm.distributed.device_communicators import shm_broadcast
from vllm_ascend.patch.platform import patch_shm_broadcast

_LOOK_AGAIN_MS = 10

shm_broadcast.SpinCondition = functools.partial(shm_broadcast.SpinCondition, busy_loop_s=0.0)
patch_shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = _LOOK_AGAIN_MS
