"""Routing replay in verl's FSDP2 engine, with the routers of transformers 5."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from verl_plugin.routing_replay.families import FSDP2_FAMILIES
from verl_plugin.routing_replay.given import GivenExperts, Rows, Tally, one_hot
from verl_plugin.routing_replay.passes import FIELD, RoutedPasses
from verl_plugin.routing_replay.samples import known_rows

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class RoutedFSDP2(RoutedPasses):
    """verl's engine with the rollout's experts in packed and padded batches and with gradient checkpointing."""

    module: nn.Module
    _given: list[GivenExperts]

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """As upstream, for a micro batch whose rows have the rollout's experts."""
        if not self._in_pass:
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]  # of the engine
        with self._forward_of(self._given, self._rows(micro_batch)):
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]  # of the engine

    def _routers(self) -> Iterable[GivenExperts]:
        return self._given

    def _attach(self, replays: bool, tally: Tally | None) -> None:
        parts = self.engine_config.ulysses_sequence_parallel_size
        if parts > 1 and replays:
            raise ValueError(
                f"ulysses_sequence_parallel_size={parts} is invalid: routing replay places no experts in parts of "
                "sequences. Set it to 1."
            )
        self._given = [] if parts > 1 else [*attached(self.module, replays, tally)]

    def _rows(self, micro_batch: Any) -> Rows:
        """Return a micro batch's rows: packed samples end to end, or samples padded to the longest one."""
        batch = micro_batch.select(FIELD, "input_ids", "response_mask").to(get_device_id())
        experts, known = batch[FIELD], known_rows(batch["input_ids"], batch["response_mask"])
        if tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            flat, marks = experts.values(), known.values()
            padding = self._get_packed_pad_size(len(flat))  # type: ignore[attr-defined]  # of the engine
            flat = functional.pad(flat.long(), (0, 0, 0, 0, 0, padding))
            return Rows(flat, functional.pad(marks, (0, padding)))
        longest = int(experts.offsets().diff().max())
        rows = [functional.pad(each.long(), (0, 0, 0, 0, 0, longest - len(each))) for each in experts.unbind()]
        masks = [functional.pad(each, (0, longest - len(each))) for each in known.unbind()]
        return Rows(torch.cat(rows), torch.cat(masks))


def attached(model: nn.Module, replays: bool, tally: Tally | None) -> Iterator[GivenExperts]:
    """Put a `GivenExperts` on each router of a transformers model.

    Raises:
        ValueError: a router belongs to no family of `FSDP2_FAMILIES`.
    """
    for name, block in model.named_modules():
        found = _LAYER.search(f".{name}.")
        if found is None or not hasattr(block, "gate") or not hasattr(block, "experts"):
            continue
        given = GivenExperts(int(found[1]), replays, in_order=False, tally=tally)
        if type(block).__name__ == "DeepseekV3MoE":
            block.route_tokens_to_experts = _sigmoid_choice(block, given)
            block.experts.register_forward_pre_hook(_counted_input(given))
        elif type(block).__name__ == "Qwen3MoeSparseMoeBlock":
            block.gate.register_forward_hook(_softmax_choice(given))
            # verl computes these experts on NPUs without calling their module.
            block.gate.register_forward_hook(_counted_output(given))
        else:
            raise ValueError(
                f"routing replay: FSDP2 does not replay the router of {type(block).__name__}, only those of "
                f"{', '.join(FSDP2_FAMILIES)}. Set actor_rollout_ref.actor.strategy to megatron, or "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay to false."
            )
        yield given


def _softmax_choice(given: GivenExperts) -> Callable[..., Any]:
    """Return a hook that makes Qwen3-MoE's router return weights and numbers of the given experts beside its logits."""

    def hook(gate: Any, arguments: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, native = output
        chosen = given.choose(native, gate.num_experts)
        if chosen is native:
            return output
        scores = functional.softmax(logits, dtype=torch.float, dim=-1).gather(1, chosen)
        if gate.norm_topk_prob:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return logits, scores.to(weights.dtype), chosen

    return hook


def _sigmoid_choice(block: Any, given: GivenExperts) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return a replacement for `DeepseekV3MoE.route_tokens_to_experts`: numbers and weights of the given experts."""
    upstream = block.route_tokens_to_experts

    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        native, weights = upstream(logits)
        chosen = given.choose(native, block.n_routed_experts)
        if chosen is native:
            return native, weights
        scores = logits.sigmoid().gather(1, chosen)
        if block.norm_topk_prob:
            scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, scores * block.routed_scaling_factor

    return route


def _counted_input(given: GivenExperts) -> Callable[..., None]:
    def hook(experts: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        given.count(one_hot(arguments[1], experts.num_experts))

    return hook


def _counted_output(given: GivenExperts) -> Callable[..., None]:
    def hook(gate: Any, arguments: Any, output: tuple[torch.Tensor, ...]) -> None:
        given.count(one_hot(output[2], gate.num_experts))

    return hook
