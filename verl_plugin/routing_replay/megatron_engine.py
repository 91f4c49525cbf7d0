"""Routing replay in verl's engine for Megatron-core, with MindSpeed or without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.megatron_utils import unwrap_model

from verl_plugin.routing_replay.given import GivenExperts, Rows, Tally
from verl_plugin.routing_replay.passes import FIELD, RoutedPasses
from verl_plugin.routing_replay.samples import TakenApart, known_rows


class RoutedMegatron(RoutedPasses):
    """verl's engine with the rollout's experts in packed and padded batches, recomputation and pipeline stages.

    verl 0.9.1 places experts as in packed batches whatever the batches are
    (docs/upstream/verl-router-replay-padded.md), and starts a replay by a list of the whole process, which building a
    second model empties (docs/upstream/verl-router-replay-two-models.md). Here every model has its own list.
    """

    module: list[nn.Module]
    tf_config: Any
    _given: dict[int, list[GivenExperts]]

    def forward_step(self, batch_iter: Iterator[Any], model: nn.Module, *processors: Any, **named: Any) -> Any:
        """As upstream, for a micro batch whose rows have the rollout's experts."""
        if not self._in_pass:
            return super().forward_step(batch_iter, model, *processors, **named)  # type: ignore[misc]  # of the engine
        batch = next(batch_iter)
        with self._forward_of(self._given[id(model)], self._rows(batch)):
            return super().forward_step(iter([batch]), model, *processors, **named)  # type: ignore[misc]  # of the engine

    def _routers(self) -> Iterable[GivenExperts]:
        return [each for routers in getattr(self, "_given", {}).values() for each in routers]

    def _attach(self, replays: bool, tally: Tally | None) -> None:
        packed = self.engine_config.use_remove_padding
        if self.engine_config.context_parallel_size > 1 and not packed:
            raise ValueError(
                f"use_remove_padding={packed} is invalid: with context_parallel_size="
                f"{self.engine_config.context_parallel_size} routing replay supports only packed batches. "
                "Set it to true."
            )
        self._given = {id(chunk): [*attached(unwrap_model(chunk), replays, tally)] for chunk in self.module}

    def _rows(self, batch: Any) -> Rows:
        """Return a batch's rows in the order in which this rank's routers flatten it: [tokens, samples], or packed.

        verl splits packed experts over ranks that share sequences as it splits their tokens.
        """
        longest = tu.get_non_tensor_data(data=batch, key="forced_max_seqlen", default=None)
        # On the host: verl places one sample after another, and on a device each takes several operators.
        batch = batch.select(FIELD, "input_ids", "response_mask").cpu()
        experts, known = batch[FIELD], known_rows(batch["input_ids"], batch["response_mask"]).values()
        # `known` goes along as one more layer, so that verl places it together with the experts.
        mark = known[:, None, None].expand(-1, 1, experts.shape[-1])
        marked = torch.cat([experts.values(), mark.to(experts.dtype)], dim=1)
        samples = TakenApart(torch.nested.nested_tensor_from_jagged(marked, offsets=experts.offsets()))
        if self.engine_config.use_remove_padding:
            flat = preprocess_thd_engine(samples, pre_process=True)[0].squeeze(0)
        else:
            flat = preprocess_bshd_engine(samples, pre_process=True, forced_max_seqlen=longest)[0]
            flat = flat.transpose(0, 1).flatten(0, 1)
        if self.tf_config.sequence_parallel:
            size = parallel_state.get_tensor_model_parallel_world_size()
            flat = flat.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        flat = flat.to(get_device_id())
        return Rows(flat[:, :-1].long(), flat[:, -1, 0].bool())


def attached(model: nn.Module, replays: bool, tally: Tally | None) -> Iterator[GivenExperts]:
    """Put a `GivenExperts` on each router of a model chunk's decoder. MTP layers get none."""
    for module in getattr(model, "decoder", model).modules():
        if isinstance(module, TopKRouter) and module.layer_number is not None:
            given = GivenExperts(module.layer_number - 1, replays, in_order=True, tally=tally)
            module.router_replay = given
            module.register_forward_hook(_counted(given))
            yield given


def _counted(given: GivenExperts) -> Any:
    def hook(module: nn.Module, arguments: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        given.count(output[1])

    return hook
