"""A naive reference for the sharding specs: slice full HuggingFace tensors into a rank's state with plain torch."""

import torch

from post_training.layouts.layout import RolloutPlacement, TrainPlacement
from post_training.models.deepseek_v3 import DeepseekV3Shape, hf_shapes

SMALL = DeepseekV3Shape(
    hidden=8,
    intermediate=24,
    moe_intermediate=24,
    layers=3,
    dense_layers=1,
    heads=24,
    experts=24,
    shared_experts=1,
    q_lora=6,
    kv_lora=4,
    qk_nope=2,
    qk_rope=2,
    v_head=2,
    vocab=100,
)

State = dict[str, torch.Tensor]


def full_weights(shape: DeepseekV3Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> State:
    """Draw tensors for every HF name, with values that are exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(dims, generator=generator).to(torch.bfloat16).to(dtype)
        for name, dims in hf_shapes(shape).items()
    }


def chunk(tensor: torch.Tensor, parts: int, index: int, dimension: int = 0) -> torch.Tensor:
    return tensor.chunk(parts, dimension)[index]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8)
    )


def by_layer(full: State, layers: int) -> list[State]:
    """Return each layer's tensors by their names inside it; cached for each set of weights."""
    if id(full) not in _BY_LAYER:
        grouped: list[State] = [{} for _ in range(layers)]
        for name, value in full.items():
            if name.startswith("model.layers."):
                _, _, layer, rest = name.split(".", 3)
                grouped[int(layer)][rest] = value
        # Keep the weights too, so that no other object can get their id.
        _BY_LAYER[id(full)] = (full, grouped)
    return _BY_LAYER[id(full)][1]


_BY_LAYER: dict[int, tuple[State, list[State]]] = {}


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def megatron_state(full: State, shape: DeepseekV3Shape, placement: TrainPlacement, rank: int) -> State:
    """Return the state of a Megatron rank, with MindSpeed-LLM's names."""
    tp, tp_rank, stage = placement.tp, rank % placement.tp, rank // (placement.tp * placement.dp)
    ep_rank = rank // tp % placement.dp % placement.ep
    state, layers = State(), by_layer(full, shape.layers)
    for virtual in range(placement.virtual_stages):
        part = virtual * placement.pp + stage
        first = sum(placement.num_layer_list[:part])
        prefix = f"chunks.{virtual}." if placement.virtual_stages > 1 else ""
        for position in range(placement.num_layer_list[part]):
            for name, value in megatron_layer(layers[first + position], placement, tp_rank, ep_rank).items():
                state[f"{prefix}decoder.layers.{position}.{name}"] = value
    rows = placement.vocab_padded or shape.vocab
    if stage == 0:
        prefix = "chunks.0." if placement.virtual_stages > 1 else ""
        embedding = padded(full["model.embed_tokens.weight"], rows)
        state[f"{prefix}embedding.word_embeddings.weight"] = chunk(embedding, tp, tp_rank)
    if stage == placement.pp - 1:
        prefix = f"chunks.{placement.virtual_stages - 1}." if placement.virtual_stages > 1 else ""
        state[f"{prefix}decoder.final_layernorm.weight"] = full["model.norm.weight"]
        state[f"{prefix}output_layer.weight"] = chunk(padded(full["lm_head.weight"], rows), tp, tp_rank)
    return {name: value.clone() for name, value in state.items()}


def megatron_layer(source: State, placement: TrainPlacement, tp_rank: int, ep_rank: int) -> State:
    tp = placement.tp
    state = {
        "input_layernorm.weight": source["input_layernorm.weight"],
        "pre_mlp_layernorm.weight": source["post_attention_layernorm.weight"],
        "self_attention.linear_qkv.weight": torch.cat(
            [source["self_attn.q_a_proj.weight"], source["self_attn.kv_a_proj_with_mqa.weight"]]
        ),
        "self_attention.q_layernorm.weight": source["self_attn.q_a_layernorm.weight"],
        "self_attention.k_layernorm.weight": source["self_attn.kv_a_layernorm.weight"],
        "self_attention.linear_qb.weight": chunk(source["self_attn.q_b_proj.weight"], tp, tp_rank),
        "self_attention.linear_kvb.weight": chunk(source["self_attn.kv_b_proj.weight"], tp, tp_rank),
        "self_attention.linear_proj.weight": chunk(source["self_attn.o_proj.weight"], tp, tp_rank, 1),
    }
    mlp = "mlp.shared_experts." if "mlp.gate.weight" in source else "mlp."
    gate_up = [chunk(source[f"{mlp}{name}_proj.weight"], tp, tp_rank) for name in ("gate", "up")]
    state[f"{mlp}linear_fc1.weight"] = torch.cat(gate_up)
    state[f"{mlp}linear_fc2.weight"] = chunk(source[f"{mlp}down_proj.weight"], tp, tp_rank, 1)
    if "mlp.gate.weight" not in source:
        return state
    state["mlp.router.weight"] = source["mlp.gate.weight"]
    state["mlp.router.expert_bias"] = source["mlp.gate.e_score_correction_bias"]
    return state | megatron_experts(source, placement, tp_rank, ep_rank)


def megatron_experts(source: State, placement: TrainPlacement, tp_rank: int, ep_rank: int) -> State:
    """Return a layer's routed experts on one rank."""
    tp, state = placement.tp, State()
    count = len(source["mlp.gate.weight"])
    cut = 1 if placement.moe_tp_extend_ep else tp
    group = placement.ep * tp // cut
    index = ep_rank * tp + tp_rank if placement.moe_tp_extend_ep else ep_rank
    first, second = [], []
    for expert in range(index * count // group, (index + 1) * count // group):
        gate, up, down = (source[f"mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        part = tp_rank if cut > 1 else 0
        first.append(torch.cat([chunk(gate, cut, part), chunk(up, cut, part)]).t())
        second.append(chunk(down, cut, part, 1).t())
    hidden = source["mlp.gate.weight"].shape[1]
    state["mlp.experts.weight1"] = torch.stack(first).reshape(hidden, -1)
    state["mlp.experts.weight2"] = torch.stack(second).reshape(-1, hidden)
    return state


def rollout_state(full: State, shape: DeepseekV3Shape, placement: RolloutPlacement, rank: int) -> State:
    """Return the state of a vLLM-Ascend rank."""
    tp, tp_rank = placement.tp, rank % placement.tp
    state, layers = State({"model.norm.weight": full["model.norm.weight"]}), by_layer(full, shape.layers)
    rows = -(-shape.vocab // placement.vocab_multiple) * placement.vocab_multiple
    for name, parts in (("model.embed_tokens.weight", tp), ("lm_head.weight", placement.lm_head_size)):
        state[name] = chunk(padded(full[name], rows), parts, rank % parts)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, value in rollout_layer(layers[layer], placement, rank, tp_rank).items():
            state[prefix + name] = value
    return {name: value.clone() for name, value in state.items()}


def rollout_layer(source: State, placement: RolloutPlacement, rank: int, tp_rank: int) -> State:
    tp = placement.tp
    whole = (
        "self_attn.q_a_proj",
        "self_attn.q_a_layernorm",
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.kv_a_layernorm",
    )
    whole += ("input_layernorm", "post_attention_layernorm")
    state = {f"{name}.weight": source[f"{name}.weight"] for name in whole}
    for name in ("self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight"):
        state[name] = chunk(source[name], tp, tp_rank)
    state["self_attn.o_proj.weight"] = chunk(source["self_attn.o_proj.weight"], tp, tp_rank, 1)
    mlp, parts = ("mlp.shared_experts.", tp) if "mlp.gate.weight" in source else ("mlp.", tp)
    if placement.shared_expert_replicated and "mlp.gate.weight" in source:
        parts = 1
    gate_up = [chunk(source[f"{mlp}{name}_proj.weight"], parts, tp_rank % parts) for name in ("gate", "up")]
    state[f"{mlp}gate_up_proj.weight"] = torch.cat(gate_up)
    state[f"{mlp}down_proj.weight"] = chunk(source[f"{mlp}down_proj.weight"], parts, tp_rank % parts, 1)
    if "mlp.gate.weight" not in source:
        return state
    for name in ("mlp.gate.weight", "mlp.gate.e_score_correction_bias"):
        state[name] = source[name]
    return state | rollout_experts(source, placement, rank)


def rollout_experts(source: State, placement: RolloutPlacement, rank: int) -> State:
    """Return a layer's routed experts on one rank."""
    count, world = len(source["mlp.gate.weight"]), placement.tp * placement.dp
    index = rank % world
    if placement.ep == 1:
        experts, parts, part = range(count), world, index
    else:
        last = count if index == world - 1 else (index + 1) * (count // world)
        experts, parts, part = range(index * (count // world), last), 1, 0
    w13, w2 = [], []
    for expert in experts:
        gate, up, down = (source[f"mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        w13.append(torch.cat([chunk(gate, parts, part), chunk(up, parts, part)]))
        w2.append(chunk(down, parts, part, 1))
    return {"mlp.experts.w13_weight": torch.stack(w13), "mlp.experts.w2_weight": torch.stack(w2)}
