"""An update whose loss takes the log-probs of its own forward as old ones; both training engines share it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs
from verl.utils import tensordict_utils as tu
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import response_from_nested

from verl_plugin.onpolicy.checks import dropout_problems

OLD = "old_log_probs"
ENTROPY = "entropy"
OWN_ENTROPY = "entropy_without_gradient"
_ROLLOUT, _MASK = "rollout_log_probs", "response_mask"

Rows = dict[str, list[torch.Tensor]]
"""By field name, the token values of each answer of this rank: [tokens] each."""


class OnPolicyUpdate:
    """Mixin that `extend_engine` puts before a training engine of verl.

    An update with old log-probs, and a forward without backward, are verl's. Metrics that verl's trainer would compute
    from old log-probs are computed by verl's own functions from the same answers, on the first data-parallel rank.
    """

    model_config: Any
    _takes_own: bool = False

    def initialize(self) -> None:
        """As upstream.

        Raises:
            ValueError: the model has dropout, with which two forwards differ.
        """
        super().initialize()  # type: ignore[misc]  # of the engine that this extends
        for problem in dropout_problems(self.model_config.hf_config.to_dict(), "config.json: "):
            raise ValueError(problem)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """As upstream; an update without old log-probs takes its own."""
        if forward_only or OLD in data.keys():
            return super().forward_backward_batch(data, loss_function, forward_only=forward_only)  # type: ignore[misc]  # of the engine
        rows: Rows = {}
        try:
            self._takes_own = not tu.get_non_tensor_data(data, key="calculate_entropy", default=False)
            loss = partial(own_loss, loss_function, rows)
            output = super().forward_backward_batch(data, loss, forward_only=False)  # type: ignore[misc]  # of the engine
        finally:
            self._takes_own = False
        if self.is_mp_src_rank_with_outputs():  # type: ignore[attr-defined]  # of the engine
            group = self.get_data_parallel_group()  # type: ignore[attr-defined]  # of the engine
            output["metrics"] |= gathered_metrics(rows, loss_function.keywords["config"], group)
        return output


def own_loss(
    loss_function: Callable[..., Any], rows: Rows, *, model_output: dict[str, Any], data: Any, dp_group: Any = None
) -> Any:
    """Return verl's loss of a micro batch, with the detached log-probs of `model_output` as old ones.

    Args:
        loss_function: verl's.
        rows: the answers of the micro batch are appended to it.
        model_output: jagged [samples, tokens] each.
        data: the micro batch, which gets `old_log_probs`, jagged [samples, tokens of the answer].
        dp_group: passed on.
    """
    mask, entropy = data[_MASK], model_output.pop(OWN_ENTROPY, None)
    entropy = model_output[ENTROPY].detach() if entropy is None else entropy
    data[OLD] = response_from_nested(model_output["log_probs"].detach(), mask)
    fields = {_MASK: mask, OLD: data[OLD], ENTROPY: response_from_nested(entropy, mask)}
    if _ROLLOUT in data.keys():
        fields[_ROLLOUT] = data[_ROLLOUT]
    for name, values in fields.items():
        rows.setdefault(name, []).extend(values.unbind())
    return loss_function(model_output=model_output, data=data, dp_group=dp_group)


def gathered_metrics(rows: Rows, actor: Any, group: Any) -> dict[str, Metric]:
    """Return the metrics of a step's answers on the first rank of a group, none on the others. Collective.

    Each rank receives all answers, 16 bytes a token: 130 MB for 8,192 answers of 1,000 tokens.

    Args:
        rows: the answers of this rank.
        actor: verl's `ActorConfig`.
        group: the data-parallel ranks.
    """
    own = {name: [value.float().cpu() for value in values] for name, values in rows.items()}
    everyone: list[Any] = [own] * dist.get_world_size(group)
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own, group=group)
    if dist.get_rank(group) != 0:
        return {}
    # All ranks that report have the same number: the maximum keeps it, a mean would round.
    found = step_metrics({name: [row for each in everyone for row in each[name]] for name in own}, actor)
    return {name: Metric(value=value, aggregation=AggregationType.MAX) for name, value in found.items()}


def step_metrics(rows: Rows, actor: Any) -> dict[str, float]:
    """Return the metrics that verl's trainer computes from old log-probs, by verl's own functions."""
    batch = {name: pad_sequence(values, batch_first=True) for name, values in rows.items()}
    aggregation = {"loss_agg_mode": actor.loss_agg_mode, "loss_scale_factor": actor.loss_scale_factor}
    found = {ENTROPY: agg_loss(loss_mat=batch[ENTROPY], loss_mask=batch[_MASK], **aggregation).item()}
    if _ROLLOUT in batch:
        tensors = TensorDict(batch | {"responses": batch[_MASK]}, batch_size=len(batch[_MASK]))
        found |= calculate_debug_metrics(DataProto(batch=tensors))
        found |= compute_rollout_corr_metrics_from_logprobs(batch[OLD], batch[_ROLLOUT], batch[_MASK])
    return found
