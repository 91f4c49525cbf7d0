"""A negative control, loaded by VERL_USE_EXTERNAL_MODULES: old log-probs come from the newest weights.

verl computes those of each optimizer step with the weights that the rollout has. Here the model stays as it is.
"""

from functools import wraps

from verl.experimental.separation.engine_workers import DetachActorWorker

import tests.stack_2026.verl.noted_updates  # noqa: F401


@wraps(DetachActorWorker.restore_model_from_cpu)  # with the attributes by which verl's worker groups call it
def _stay(self: DetachActorWorker, n: int) -> None:
    """Restore nothing."""


DetachActorWorker.restore_model_from_cpu = _stay
