"""For a machine with fewer cores than a run has processes: vLLM's readers of messages sleep until one comes.

Importing this changes vLLM in this process and in those that are forked from it. A reader of vLLM's shared memory asks
for a second after every message whether there is another one, and takes a whole core for it: on a server with more
cores than processes that saves microseconds, and here it takes the core from whoever is to write the message.
"""

import functools

from vllm.distributed.device_communicators import shm_broadcast

shm_broadcast.SpinCondition = functools.partial(shm_broadcast.SpinCondition, busy_loop_s=0.0)
