"""Imports of the workers' fork server, done once: the overlay first, then the stack."""

import verl_patches.prelude_patch  # noqa: F401, I001
import vllm  # noqa: F401
import verl.workers.megatron_workers  # noqa: F401
import verl.workers.rollout.vllm_rollout  # noqa: F401
import verl.workers.sharding_manager.megatron_vllm  # noqa: F401
