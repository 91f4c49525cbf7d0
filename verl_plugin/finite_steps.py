"""Skips updates whose gradients, or their norm, are not finite, in verl's engine for Megatron-core.

verl 0.9.1 skips such an update with FSDP, but not with Megatron in bfloat16: inf and NaN reach the weights
(docs/upstream/verl-megatron-nonfinite-gradients.md). This module extends verl's engine `megatron` on NPUs; if one rank
has such a gradient, no rank steps.

    actor_rollout_ref.model.external_lib=[verl_plugin.finite_steps,...]

`actor/nonfinite_steps` is the mean over the updates of a step: 1 where all of them were skipped.
"""

from __future__ import annotations

from typing import Any

from verl.utils.metric import AggregationType, Metric

from post_training.finite_steps.guard import NonfiniteGuard
from post_training.finite_steps.weights import check_weights
from post_training.live_tensors import gradient_tensors
from post_training.report.run_error import RunError
from verl_plugin.engines import extend_engine

MOST_IN_A_ROW = 10
"""Skipped updates after which a run ends: its gradients do not become finite by themselves."""
METRIC = "nonfinite_steps"
_LIBRARY = "verl_plugin.finite_steps"
_REMEDY = f"remove {_LIBRARY} from actor_rollout_ref.model.external_lib to train with it"


class FiniteSteps:
    """verl's engine, whose optimizer is guarded against gradients that are not finite."""

    module: Any
    optimizer: Any
    _skipped_in_a_row = 0

    def optimizer_step(self) -> Any:
        """Step, or skip on every rank; returns the norm of the gradients, which then is inf or NaN.

        Raises:
            NonfiniteWeightsError: an update was skipped, and the weights hold inf or NaN.
            RunError: the last `MOST_IN_A_ROW` updates were skipped.
        """
        optimizer = self.optimizer
        guard = NonfiniteGuard(optimizer, lambda: gradient_tensors(self.module), remedy=_REMEDY)
        self.optimizer = guard
        try:
            norm = super().optimizer_step()  # type: ignore[misc]  # of the engine that this extends
        finally:
            self.optimizer = optimizer
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if guard.skipped else 0
        if guard.skipped:
            # With weights that are not finite every later update would be skipped.
            check_weights(self.module, "after a skipped update, weights", "begin from earlier weights")
        if self._skipped_in_a_row >= MOST_IN_A_ROW:
            raise RunError(
                f"the last {MOST_IN_A_ROW} updates had gradients that are not finite, and were skipped. Begin from an "
                "earlier checkpoint, with a lower actor_rollout_ref.actor.optim.lr",
                "not_valid",
            )
        return norm

    def train_batch(self, *args: Any, **options: Any) -> Any:
        """As verl's, with `nonfinite_steps` among the metrics."""
        outputs = super().train_batch(*args, **options)  # type: ignore[misc]  # of the engine
        if self.is_mp_src_rank_with_outputs():  # type: ignore[attr-defined]  # of the engine
            value = int(self._skipped_in_a_row > 0)
            outputs["metrics"][METRIC] = Metric(value=value, aggregation=AggregationType.MEAN)
        return outputs


extend_engine("megatron", FiniteSteps)
