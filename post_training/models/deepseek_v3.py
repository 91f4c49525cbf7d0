"""The DeepSeek-V3 sharding specs: HuggingFace files, Megatron (MindSpeed-LLM v2.0.0 names), vLLM-Ascend 0.9.1 rollout.

HF names and shapes are those of transformers' DeepseekV3ForCausalLM; every linear weight is [out, in].
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from post_training.layouts.experts import Experts, megatron_experts, rollout_experts
from post_training.layouts.layout import (
    LayerSlot,
    LocalView,
    RolloutPlacement,
    Shard,
    Table,
    TrainPlacement,
    cut_shard,
    gate_up_shards,
    gated_shapes,
    megatron_vocabulary_shards,
    rollout_vocabulary_shards,
    whole_slice,
)
from post_training.models.families import MegatronModel, MindspeedModel, ModelFamily, variant_findings
from post_training.models.sentences import invalid, reject
from post_training.models.sizes import ModelSizes

CASTABLE = (".mlp.gate.weight",)
"""Endings of tensors that both sides may keep in different types: with `enable_super_kernel` vLLM-Ascend keeps the
router's weight in float32, which represents training's bfloat16 exactly."""

FLOAT32 = (".mlp.gate.e_score_correction_bias",)
"""Published in float32 near 5; bfloat16 would round away the differences that matter (see `models.expert_bias`)."""


_CONFIGURATION_KEYS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "first_k_dense_replace",
    "num_attention_heads", "n_routed_experts", "n_shared_experts", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "vocab_size",
)  # fmt: skip


_AS_PUBLISHED = {
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False, "tie_word_embeddings": False,
    "moe_layer_freq": 1,
}  # fmt: skip


def _layout_variants(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each value of a configuration that the sharding specs do not describe."""
    if config.get("q_lora_rank") is None:
        reason = "only DeepSeek models with q_lora_rank (V2, V3, R1) have a sharding spec, not V2-Lite"
        yield invalid("q_lora_rank", None, reason, "Set actor_rollout_ref.model.path to DeepSeek-V3 or R1")
    for key in ("moe_layer_freq", "tie_word_embeddings"):
        if config.get(key, _AS_PUBLISHED[key]) != _AS_PUBLISHED[key]:
            reason = "the DeepSeek-V3 layout needs moe_layer_freq=1 and tie_word_embeddings=False"
            yield invalid(key, config[key], reason, "Set actor_rollout_ref.model.path to DeepSeek-V3 or R1")


def variants(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each value that the sharding specs do not describe or training has no modules for."""
    yield from _layout_variants(config)
    if config.get("num_nextn_predict_layers"):
        reason = "layers for multi-token prediction are not trained"
        remedy = "Set num_nextn_predict_layers to 0; the weights of these layers may stay in the folder"
        yield invalid("num_nextn_predict_layers", config["num_nextn_predict_layers"], reason, remedy)
    for key in ("scoring_func", "topk_method", "attention_bias"):
        if config.get(key, _AS_PUBLISHED[key]) != _AS_PUBLISHED[key]:
            reason = f"training and rollout support only {key}={_AS_PUBLISHED[key]} for DeepSeek-V3"
            yield invalid(key, config[key], reason, "Set actor_rollout_ref.model.path to DeepSeek-V3 or R1")
    for key in ("first_k_dense_replace", "n_shared_experts"):
        if key not in config:
            yield invalid(key, None, "every DeepSeek-V3 has it", "Copy the file again")


@dataclass(frozen=True)
class DeepseekV3Shape:
    """The sizes that determine every tensor shape of DeepSeek-V3."""

    hidden: int
    intermediate: int
    moe_intermediate: int
    layers: int
    dense_layers: int
    heads: int
    experts: int
    shared_experts: int
    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int
    vocab: int
    mtp_layers: int = 0

    @classmethod
    def from_config(cls, config: Any) -> "DeepseekV3Shape":
        """Read a transformers DeepseekV3Config (or the mapping of its config.json).

        Raises ValueError for a variant that the sharding specs do not describe.
        """
        values = config if isinstance(config, Mapping) else config.to_dict()
        reject(_layout_variants(values))
        missing = [key for key in _CONFIGURATION_KEYS if key not in values]
        if missing:
            raise ValueError(f"the model's configuration has no {missing[0]}, which every DeepSeek-V3 has")
        return cls(
            hidden=values["hidden_size"],
            intermediate=values["intermediate_size"],
            moe_intermediate=values["moe_intermediate_size"],
            layers=values["num_hidden_layers"],
            dense_layers=values["first_k_dense_replace"],
            heads=values["num_attention_heads"],
            experts=values["n_routed_experts"],
            shared_experts=values["n_shared_experts"],
            q_lora=values["q_lora_rank"],
            kv_lora=values["kv_lora_rank"],
            qk_nope=values["qk_nope_head_dim"],
            qk_rope=values["qk_rope_head_dim"],
            v_head=values["v_head_dim"],
            vocab=values["vocab_size"],
            mtp_layers=values.get("num_nextn_predict_layers") or 0,
        )

    @property
    def kv_a(self) -> int:
        return self.kv_lora + self.qk_rope

    @property
    def shared_intermediate(self) -> int:
        return self.moe_intermediate * self.shared_experts

    def is_dense(self, layer: int) -> bool:
        return layer < self.dense_layers


def table(shape: DeepseekV3Shape) -> Table:
    """Return all layouts of a DeepSeek-V3 of these sizes."""
    return Table(
        layers=shape.layers,
        shapes=hf_shapes(shape),
        megatron=partial(megatron, shape),
        vllm_ascend=partial(vllm_ascend, shape),
        castable=CASTABLE,
        float32=FLOAT32,
        ignored_in_files=ignored_in_files(shape),
        prediction_layer=partial(mtp_shapes, shape),
    )


def hf_shapes(shape: DeepseekV3Shape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every HuggingFace tensor, without the multi-token-prediction layers."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        shapes |= _layer_shapes(shape, layer)
    shapes["model.norm.weight"] = (shape.hidden,)
    shapes["lm_head.weight"] = (shape.vocab, shape.hidden)
    return shapes


def _layer_shapes(shape: DeepseekV3Shape, layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{layer}."
    attention = {
        "q_a_proj": (shape.q_lora, shape.hidden),
        "q_a_layernorm": (shape.q_lora,),
        "q_b_proj": (shape.heads * (shape.qk_nope + shape.qk_rope), shape.q_lora),
        "kv_a_proj_with_mqa": (shape.kv_a, shape.hidden),
        "kv_a_layernorm": (shape.kv_lora,),
        "kv_b_proj": (shape.heads * (shape.qk_nope + shape.v_head), shape.kv_lora),
        "o_proj": (shape.hidden, shape.heads * shape.v_head),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}self_attn.{name}.weight": dims for name, dims in attention.items()}
    shapes[f"{prefix}input_layernorm.weight"] = (shape.hidden,)
    shapes[f"{prefix}post_attention_layernorm.weight"] = (shape.hidden,)
    if shape.is_dense(layer):
        return shapes | gated_shapes(f"{prefix}mlp.", shape.hidden, shape.intermediate)
    shapes[f"{prefix}mlp.gate.weight"] = (shape.experts, shape.hidden)
    shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (shape.experts,)
    shapes |= gated_shapes(f"{prefix}mlp.shared_experts.", shape.hidden, shape.shared_intermediate)
    for expert in range(shape.experts):
        shapes |= gated_shapes(f"{prefix}mlp.experts.{expert}.", shape.hidden, shape.moe_intermediate)
    return shapes


def ignored_in_files(shape: DeepseekV3Shape) -> tuple[str, ...]:
    """Return prefixes of tensors that a checkpoint may have and no layout uses: the multi-token-prediction layers."""
    return tuple(f"model.layers.{shape.layers + extra}." for extra in range(shape.mtp_layers))


def mtp_shapes(shape: DeepseekV3Shape, layer: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every HuggingFace tensor of one layer for multi-token prediction.

    `layer` is its number in the names; the first one follows the last layer of the model.
    """
    prefix, sparse = f"model.layers.{layer}.", f"model.layers.{shape.dense_layers}."
    shallow = hf_shapes(replace(shape, layers=shape.dense_layers + 1))
    return {prefix + name.removeprefix(sparse): dims for name, dims in shallow.items() if name.startswith(sparse)} | {
        f"{prefix}enorm.weight": (shape.hidden,),
        f"{prefix}hnorm.weight": (shape.hidden,),
        f"{prefix}eh_proj.weight": (shape.hidden, 2 * shape.hidden),
        f"{prefix}shared_head.norm.weight": (shape.hidden,),
        f"{prefix}embed_tokens.weight": (shape.vocab, shape.hidden),
        f"{prefix}shared_head.head.weight": (shape.vocab, shape.hidden),
    }


def megatron(shape: DeepseekV3Shape, placement: TrainPlacement, rank: int) -> list[Shard]:
    """Return the shards of one training rank.

    Raises ValueError if the layer list does not add up or a width does not divide over the ranks.
    """
    if sum(placement.num_layer_list) != shape.layers:
        raise ValueError(f"num_layer_list {placement.num_layer_list} does not add up to {shape.layers} layers")
    tp_rank = placement.tp_rank(rank)
    shards: list[Shard] = []
    for slot in placement.layers(rank):
        local = f"{placement.chunk_prefix(slot.chunk)}decoder.layers.{slot.position}."
        shards += _megatron_dense_part(shape, slot, local, placement.tp, tp_rank)
        if not shape.is_dense(slot.layer):
            shards += megatron_experts(_experts(shape), placement, rank, slot.layer, f"{local}mlp.experts.")
    if placement.pp_rank(rank) == 0:
        embedding = placement.chunk_prefix(0) + "embedding.word_embeddings.weight"
        shards += megatron_vocabulary_shards(
            "model.embed_tokens.weight", embedding, shape.vocab, shape.hidden, placement, rank
        )
    if placement.pp_rank(rank) == placement.pp - 1:
        last = placement.chunk_prefix(placement.virtual_stages - 1)
        shards.append(Shard("model.norm.weight", whole_slice((shape.hidden,)), f"{last}decoder.final_layernorm.weight"))
        shards += megatron_vocabulary_shards(
            "lm_head.weight", f"{last}output_layer.weight", shape.vocab, shape.hidden, placement, rank
        )
    return shards


def _experts(shape: DeepseekV3Shape) -> Experts:
    return Experts(shape.experts, shape.hidden, shape.moe_intermediate)


@lru_cache(maxsize=4096)
def _megatron_dense_part(shape: DeepseekV3Shape, slot: LayerSlot, local: str, tp: int, tp_rank: int) -> list[Shard]:
    """Return all shards of a layer except its routed experts."""
    hf_name = f"model.layers.{slot.layer}."
    shapes = _layer_shapes(shape, slot.layer)

    def whole(name: str, local_name: str) -> Shard:
        return Shard(hf_name + name, whole_slice(shapes[hf_name + name]), local + local_name)

    def cut(name: str, local_name: str, dimension: int) -> Shard:
        return cut_shard(hf_name + name, shapes[hf_name + name], local + local_name, dimension, tp, tp_rank)

    linear_qkv = local + "self_attention.linear_qkv.weight"
    q_a, kv_a = hf_name + "self_attn.q_a_proj.weight", hf_name + "self_attn.kv_a_proj_with_mqa.weight"
    shards = [
        whole("input_layernorm.weight", "input_layernorm.weight"),
        whole("post_attention_layernorm.weight", "pre_mlp_layernorm.weight"),
        whole("self_attn.q_a_layernorm.weight", "self_attention.q_layernorm.weight"),
        whole("self_attn.kv_a_layernorm.weight", "self_attention.k_layernorm.weight"),
        Shard(q_a, whole_slice(shapes[q_a]), linear_qkv, LocalView(index=((0, shape.q_lora),))),
        Shard(
            kv_a, whole_slice(shapes[kv_a]), linear_qkv, LocalView(index=((shape.q_lora, shape.q_lora + shape.kv_a),))
        ),
        cut("self_attn.q_b_proj.weight", "self_attention.linear_qb.weight", 0),
        cut("self_attn.kv_b_proj.weight", "self_attention.linear_kvb.weight", 0),
        cut("self_attn.o_proj.weight", "self_attention.linear_proj.weight", 1),
    ]
    if shape.is_dense(slot.layer):
        width, part = shape.intermediate, "mlp."
    else:
        shards.append(whole("mlp.gate.weight", "mlp.router.weight"))
        shards.append(whole("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias"))
        width, part = shape.shared_intermediate, "mlp.shared_experts."
    fused = local + part + "linear_fc1.weight"
    shards += gate_up_shards(hf_name + part, fused, shape.hidden, width, tp, tp_rank)
    shards.append(cut(part + "down_proj.weight", part + "linear_fc2.weight", 1))
    return shards


def vllm_ascend(shape: DeepseekV3Shape, placement: RolloutPlacement, rank: int) -> list[Shard]:
    """Return the shards of one rollout rank, as the model keeps them after process_weights_after_loading.

    The absorbed MLA weights (W_UK_T, W_UV) are derived from kv_b_proj and rebuilt by `mla_refresh`.
    Raises ValueError if a width does not divide over the ranks.
    """
    tp_rank = placement.tp_rank(rank)
    vocabulary = partial(
        rollout_vocabulary_shards, valid=shape.vocab, hidden=shape.hidden, placement=placement, rank=rank
    )
    shards = vocabulary("model.embed_tokens.weight", parts=placement.tp)
    for layer in range(shape.layers):
        shards += _rollout_dense_part(shape, layer, placement.tp, tp_rank, placement.shared_expert_replicated)
        if not shape.is_dense(layer):
            shards += rollout_experts(_experts(shape), placement, rank, layer)
    shards.append(Shard("model.norm.weight", whole_slice((shape.hidden,)), "model.norm.weight"))
    return shards + vocabulary("lm_head.weight", parts=placement.lm_head_size)


@lru_cache(maxsize=4096)
def _rollout_dense_part(
    shape: DeepseekV3Shape, layer: int, tp: int, tp_rank: int, shared_expert_replicated: bool
) -> list[Shard]:
    """Return all shards of a layer except its routed experts; only the fused gate_up_proj has a name of its own."""
    prefix = f"model.layers.{layer}."
    cuts = {
        f"{prefix}self_attn.q_b_proj.weight": 0,
        f"{prefix}self_attn.kv_b_proj.weight": 0,
        f"{prefix}self_attn.o_proj.weight": 1,
        f"{prefix}mlp.down_proj.weight": 1,
    }
    shards = []
    for name, dims in _layer_shapes(shape, layer).items():
        if name in cuts:
            shards.append(cut_shard(name, dims, name, cuts[name], tp, tp_rank))
        elif not any(part in name for part in (".mlp.experts.", ".shared_experts.", ".gate_proj.", ".up_proj.")):
            shards.append(Shard(name, whole_slice(dims), name))
    if shape.is_dense(layer):
        fused = f"{prefix}mlp.gate_up_proj.weight"
        return shards + gate_up_shards(f"{prefix}mlp.", fused, shape.hidden, shape.intermediate, tp, tp_rank)
    parts, index = (1, 0) if shared_expert_replicated else (tp, tp_rank)
    shared, width = f"{prefix}mlp.shared_experts.", shape.shared_intermediate
    down = f"{shared}down_proj.weight"
    shards += gate_up_shards(shared, f"{shared}gate_up_proj.weight", shape.hidden, width, parts, index)
    return shards + [cut_shard(down, (shape.hidden, width), down, 1, parts, index)]


def sizes(config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes of a DeepSeek-V3 for plans and counts. Raises KeyError if config.json lacks a size."""
    nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, query = config["kv_lora_rank"], config.get("q_lora_rank") or 0
    scaling = config.get("rope_scaling") or {}
    context = int(scaling.get("original_max_position_embeddings", 0) * scaling.get("factor", 1))
    width = config["moe_intermediate_size"]
    of_queries = heads * (nope + rope)
    return ModelSizes(
        hidden=hidden,
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        dense_layers=config.get("first_k_dense_replace", 0),
        intermediate=config["intermediate_size"],
        attention_weights=(query * (hidden + of_queries) if query else hidden * of_queries)
        + hidden * (latent + rope)
        + latent * heads * (nope + value)
        + heads * value * hidden,
        score_width=heads * (nope + rope + value),
        keys_values=heads * (nope + rope + value),
        # Query, key, value and output of the operator, the input of the query's rotation, and the operator's maxima and
        # sums of scores, 8 of each in float32.
        kept_by_heads=heads * (2 * (nope + rope) + 2 * value + rope + 32),
        kept_whole=query + latent + rope,
        cache_by_heads=0,
        cache_whole=latent + rope,
        cache_heads=1,
        rollout_attention=heads * latent * (nope + value),
        # Three tables of the model's context, which all layers share.
        rotary=3 * context * rope,
        mla=True,
        experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_width=width,
        shared_width=width * (config.get("n_shared_experts") or 0),
    )


def _megatron_config(hf_config: Any, *args: Any, **overrides: Any) -> Any:
    from post_training.models.megatron.deepseek_v3_config import deepseek_v3_config_from_huggingface

    reject(variant_findings(FAMILY, hf_config.to_dict()))
    return deepseek_v3_config_from_huggingface(hf_config, *args, **overrides)


def _megatron_model(*args: Any, **options: Any) -> Any:
    from post_training.models.megatron.deepseek_v3_model import build_deepseek_v3

    return build_deepseek_v3(*args, **options)


def _mindspeed_arguments(hf_config: Any) -> dict[str, Any]:
    from post_training.models.mindspeed.deepseek_v3_arguments import model_arguments

    reject(variant_findings(FAMILY, hf_config.to_dict()))
    return model_arguments(hf_config)


def _mindspeed_config(config: Any) -> Any:
    from post_training.models.mindspeed.packed_gpt_model import with_arguments

    return with_arguments(config)


def _mindspeed_model(*args: Any) -> Any:
    from post_training.models.mindspeed.packed_gpt_model import build_deepseek_v3

    return build_deepseek_v3(*args)


PUBLISHED = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
}
"""DeepSeek-V3, 671B: https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json"""

FAMILY = ModelFamily(
    name="DeepSeek-V3",
    architecture="DeepseekV3ForCausalLM",
    model_types=("deepseek_v3",),
    table=lambda config: table(DeepseekV3Shape.from_config(config)),
    sizes=sizes,
    megatron=MegatronModel(_megatron_config, _megatron_model, rotary=frozenset({"default", "yarn"})),
    shards=DeepseekV3Shape.from_config,
    mindspeed=MindspeedModel(_mindspeed_arguments, _mindspeed_config, _mindspeed_model),
    published={"deepseek-v3": PUBLISHED},
    balances_router=True,
    rollout_graphs="torchair",
    positive=(
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ),  # fmt: skip
    variants=variants,
)
