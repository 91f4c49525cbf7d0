"""A naive reference for grouped-query attention: slice full HuggingFace tensors into a rank's state, in plain torch."""

import dataclasses

import torch

from post_training.layouts.grouped_query import GroupedQueryShape, hf_shapes
from post_training.layouts.layout import RolloutPlacement, TrainPlacement
from tests.post_training.layouts.reference import State, chunk, megatron_experts, padded, rollout_experts

SMALL = GroupedQueryShape(
    hidden=24, intermediate=48, layers=3, heads=12, kv_heads=6, head_dim=4, vocab=100, tied=False, bias=True
)
TIED = dataclasses.replace(SMALL, tied=True)
NORMED = dataclasses.replace(SMALL, bias=False, head_norms=True)
WITH_EXPERTS = dataclasses.replace(NORMED, experts=24, expert_width=24)
SHAPES = (SMALL, TIED, NORMED, WITH_EXPERTS)


def full_weights(shape: GroupedQueryShape, dtype: torch.dtype = torch.float32, seed: int = 0) -> State:
    """Draw tensors for every HF name, with values that are exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(dims, generator=generator).to(torch.bfloat16).to(dtype)
        for name, dims in hf_shapes(shape).items()
    }


def megatron_state(full: State, shape: GroupedQueryShape, placement: TrainPlacement, rank: int) -> State:
    """Return the state of a rank with Megatron's own GPTModel (local layers)."""
    tp, tp_rank, stage = placement.tp, rank % placement.tp, rank // (placement.tp * placement.dp)
    state, prefixes = State(), [""]
    if placement.virtual_stages > 1:
        prefixes = [f"chunks.{number}." for number in range(placement.virtual_stages)]
    for number, prefix in enumerate(prefixes):
        part = number * placement.pp + stage
        for position in range(placement.num_layer_list[part]):
            layer = f"model.layers.{sum(placement.num_layer_list[:part]) + position}."
            ranks = tp_rank, rank // tp % placement.dp % placement.ep
            for name, value in megatron_layer(full, shape, layer, placement, *ranks).items():
                state[f"{prefix}decoder.layers.{position}.{name}"] = value
    rows = placement.vocab_padded or shape.vocab
    embedding = chunk(padded(full["model.embed_tokens.weight"], rows), tp, tp_rank)
    if stage == 0:
        state[f"{prefixes[0]}embedding.word_embeddings.weight"] = embedding
    if stage == placement.pp - 1:
        state[f"{prefixes[-1]}decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not shape.tied:
            state[f"{prefixes[-1]}output_layer.weight"] = chunk(padded(full["lm_head.weight"], rows), tp, tp_rank)
        elif placement.pp * placement.virtual_stages > 1:
            state[f"{prefixes[-1]}output_layer.weight"] = embedding
    return {name: value.clone() for name, value in state.items()}


def megatron_layer(
    full: State, shape: GroupedQueryShape, layer: str, placement: TrainPlacement, tp_rank: int, ep_rank: int
) -> State:
    """Return a layer's state; its query groups follow one another, each with query heads, key head and value head."""
    tp, state = placement.tp, State()
    for kind in ("weight", "bias") if shape.bias else ("weight",):
        parts = [full[f"{layer}self_attn.{name}_proj.{kind}"] for name in "qkv"]
        groups = [part.reshape(shape.kv_heads, -1, *part.shape[1:]) for part in parts]
        whole = torch.cat(groups, dim=1).flatten(0, 1)
        state[f"self_attention.linear_qkv.{kind}"] = chunk(whole, tp, tp_rank)
    if shape.head_norms:
        state["self_attention.q_layernorm.weight"] = full[f"{layer}self_attn.q_norm.weight"]
        state["self_attention.k_layernorm.weight"] = full[f"{layer}self_attn.k_norm.weight"]
    state["self_attention.linear_qkv.layer_norm_weight"] = full[f"{layer}input_layernorm.weight"]
    state["self_attention.linear_proj.weight"] = chunk(full[f"{layer}self_attn.o_proj.weight"], tp, tp_rank, 1)
    norm = full[f"{layer}post_attention_layernorm.weight"]
    if shape.experts:
        state["pre_mlp_layernorm.weight"] = norm
        state["mlp.router.weight"] = full[f"{layer}mlp.gate.weight"]
        return state | megatron_experts(inside(full, layer), placement, tp_rank, ep_rank)
    gate_up = [chunk(full[f"{layer}mlp.{name}_proj.weight"], tp, tp_rank) for name in ("gate", "up")]
    return state | {
        "mlp.linear_fc1.layer_norm_weight": norm,
        "mlp.linear_fc1.weight": torch.cat(gate_up),
        "mlp.linear_fc2.weight": chunk(full[f"{layer}mlp.down_proj.weight"], tp, tp_rank, 1),
    }


def inside(full: State, layer: str) -> State:
    """Return a layer's tensors by their names inside it."""
    return {name.removeprefix(layer): value for name, value in full.items() if name.startswith(layer)}


def rollout_state(full: State, shape: GroupedQueryShape, placement: RolloutPlacement, rank: int) -> State:
    """Return the state of a vLLM rank; if there are more ranks than key heads, consecutive ranks share a head."""
    tp, tp_rank = placement.tp, rank % placement.tp
    state = State({"model.norm.weight": full["model.norm.weight"]})
    rows = -(-shape.vocab // placement.vocab_multiple) * placement.vocab_multiple
    for name in ("model.embed_tokens.weight", *(() if shape.tied else ("lm_head.weight",))):
        state[name] = chunk(padded(full[name], rows), tp, tp_rank)
    for layer in (f"model.layers.{number}." for number in range(shape.layers)):
        for kind in ("weight", "bias") if shape.bias else ("weight",):
            query, key, value = (full[f"{layer}self_attn.{name}_proj.{kind}"] for name in "qkv")
            shared = max(tp // shape.kv_heads, 1)
            held = [chunk(part, tp // shared, tp_rank // shared) for part in (key, value)]
            state[f"{layer}self_attn.qkv_proj.{kind}"] = torch.cat([chunk(query, tp, tp_rank), *held])
        state[f"{layer}self_attn.o_proj.weight"] = chunk(full[f"{layer}self_attn.o_proj.weight"], tp, tp_rank, 1)
        whole = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        whole += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if shape.head_norms else []
        whole += ["mlp.gate.weight"] if shape.experts else []
        state |= {layer + name: full[layer + name] for name in whole}
        if shape.experts:
            held = rollout_experts(inside(full, layer), placement, rank)
            state |= {layer + name: value for name, value in held.items()}
            continue
        gate_up = [chunk(full[f"{layer}mlp.{name}_proj.weight"], tp, tp_rank) for name in ("gate", "up")]
        state[f"{layer}mlp.gate_up_proj.weight"] = torch.cat(gate_up)
        state[f"{layer}mlp.down_proj.weight"] = chunk(full[f"{layer}mlp.down_proj.weight"], tp, tp_rank, 1)
    return {name: value.clone() for name, value in state.items()}
