"""Routed experts of a transformers model computed expert by expert on sorted rows.

transformers loops over all expert modules and masks the tokens of each; with tiny experts that loop is nearly the
whole training time. Here the rows are sorted by expert once and both passes are plain matrix products on slices.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _GroupedFeedForward(torch.autograd.Function):
    """SwiGLU feed-forward of rows sorted by expert: `down(silu(gate(x)) * up(x))`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gate_up: Tensor, down: Tensor, bounds: list[tuple[int, int, int]]) -> Tensor:
        inner = rows.new_empty(rows.shape[0], gate_up.shape[1])
        for expert, start, stop in bounds:
            torch.mm(rows[start:stop], gate_up[expert].t(), out=inner[start:stop])
        gate, up = inner.chunk(2, dim=1)
        activated = functional.silu(gate) * up
        output = torch.empty_like(rows)
        for expert, start, stop in bounds:
            torch.mm(activated[start:stop], down[expert].t(), out=output[start:stop])
        ctx.save_for_backward(rows, gate_up, down, inner, activated)
        ctx.bounds = bounds
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows, gate_up, down, inner, activated = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_down, grad_gate_up = torch.zeros_like(down), torch.zeros_like(gate_up)
        grad_activated = torch.empty_like(activated)
        for expert, start, stop in ctx.bounds:
            torch.mm(grad_output[start:stop], down[expert], out=grad_activated[start:stop])
            torch.mm(grad_output[start:stop].t(), activated[start:stop], out=grad_down[expert])
        gate, up = inner.chunk(2, dim=1)
        sigmoid = torch.sigmoid(gate)
        grad_gate = grad_activated * up * sigmoid * (1 + gate * (1 - sigmoid))
        grad_inner = torch.cat([grad_gate, grad_activated * gate * sigmoid], dim=1)
        grad_rows = torch.empty_like(rows)
        for expert, start, stop in ctx.bounds:
            torch.mm(grad_inner[start:stop], gate_up[expert], out=grad_rows[start:stop])
            torch.mm(grad_inner[start:stop].t(), rows[start:stop], out=grad_gate_up[expert])
        return grad_rows, grad_gate_up, grad_down, None


def grouped_experts(
    gate_up: Tensor, down: Tensor, hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    """Return the weighted sum of every token's experts, as the blocks of transformers do.

    Args:
        gate_up: [experts, 2 * width, hidden], gate rows first.
        down: [experts, hidden, width].
        hidden_states: [tokens, hidden].
        expert_ids: [tokens, chosen], integer.
        expert_weights: [tokens, chosen].

    Returns:
        [tokens, hidden], in the dtype of `hidden_states`.
    """
    chosen = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)
    counts = torch.bincount(expert_ids.flatten(), minlength=gate_up.shape[0]).tolist()
    bounds, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            bounds.append((expert, start, start + count))
            start += count
    token = order // chosen
    rows = _GroupedFeedForward.apply(hidden_states[token], gate_up, down, bounds)
    weighted = rows * expert_weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(hidden_states).index_add(0, token, weighted.to(hidden_states.dtype))


def _softmax_routed(block: Any, gate_up: Tensor, down: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Route `hidden_states` [batch, length, hidden] by one softmax over all experts.

    Returns:
        The block's output, of the same shape, and the router's logits [batch * length, experts].
    """
    rows = hidden_states.flatten(0, 1)
    logits = block.gate(rows)
    weights, experts = logits.softmax(dim=-1, dtype=torch.float32).topk(block.top_k, dim=-1)
    if block.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return grouped_experts(gate_up, down, rows, experts, weights).view_as(hidden_states), logits


def group_experts_of(model: nn.Module) -> list[nn.Parameter]:
    """Let every MoE layer of a transformers model compute its routed experts with `grouped_experts`.

    The expert weights move into two tensors a layer; the modules' own weights become views of them, so `state_dict`
    keeps its names and follows every update. A model without experts stays as it is.

    transformers 5 keeps the experts of a layer in two such tensors itself: these stay the parameters of the model.

    Returns:
        The grouped tensors that are not parameters of the model, two a layer with experts: train these in place of
        the parameters named `mlp.experts`.
    """
    grouped: list[nn.Parameter] = []
    for layer in model.model.layers:
        if not hasattr(layer.mlp, "experts"):
            continue
        experts = layer.mlp.experts
        if hasattr(experts, "gate_up_proj"):
            experts.forward = partial(grouped_experts, experts.gate_up_proj, experts.down_proj)
            continue
        gate_up = nn.Parameter(
            torch.stack([torch.cat([expert.gate_proj.weight, expert.up_proj.weight]) for expert in experts]).detach()
        )
        down = nn.Parameter(torch.stack([expert.down_proj.weight for expert in experts]).detach())
        for index, expert in enumerate(experts):
            gate, up = gate_up.data[index].chunk(2)
            expert.gate_proj.weight = nn.Parameter(gate, requires_grad=False)
            expert.up_proj.weight = nn.Parameter(up, requires_grad=False)
            expert.down_proj.weight = nn.Parameter(down.data[index], requires_grad=False)
        if hasattr(layer.mlp, "moe"):  # a block that routes by itself, and leaves the experts to this method
            layer.mlp.moe = partial(grouped_experts, gate_up, down)
        else:
            layer.mlp.forward = partial(_softmax_routed, layer.mlp, gate_up, down)
        grouped += [gate_up, down]
    return grouped
