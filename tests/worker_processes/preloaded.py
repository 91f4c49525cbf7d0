"""Imports of the workers' fork server, done once: the overlay first, then the stack.

The collector sleeps meanwhile, and leaves alone afterwards what all forks share.
"""

import gc

gc.disable()

import verl_patches.prelude_patch  # noqa: E402, F401, I001
import vllm  # noqa: E402, F401
import verl.workers.megatron_workers  # noqa: E402, F401
import verl.workers.rollout.vllm_rollout  # noqa: E402, F401
import verl.workers.sharding_manager.megatron_vllm  # noqa: E402, F401

gc.collect()
gc.freeze()
gc.enable()
