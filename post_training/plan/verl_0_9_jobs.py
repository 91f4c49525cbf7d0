"""Reads jobs with verl 0.9's own keys (stack 2026) for the plan; training is offloaded while vLLM is awake.

Activations follow the formulas of the stack 2025. Their constants were measured there, so for this verl they are
estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from post_training.layouts.layout import RolloutPlacement, TrainPlacement
from post_training.models.families import sizes_of, table_for
from post_training.plan.device import Rank
from post_training.plan.fsdp import FsdpJob
from post_training.plan.fsdp_report import FsdpPlan, make_fsdp_plan
from post_training.plan.job import Job, Recomputation, sequences_of
from post_training.plan.report import JobPlan, Machine, make_job_plan

_LAYER, _OUTPUT_LAYER, _ACTOR = "model.layers.0.", "lm_head.weight", "actor_rollout_ref.actor"
_ENGINE = "lower actor_rollout_ref.rollout.gpu_memory_utilization"
_BUCKETS = (
    "lower additional_config.alltoallv.bucket_megabytes and "
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
)
_FORWARD = "lower {}.log_prob_max_token_len_per_gpu"
REMEDIES = {
    "init": _ENGINE,
    "idle": "raise actor_rollout_ref.rollout.tensor_model_parallel_size",
    "reshard": _BUCKETS,
    "rollout": _ENGINE,
    "old_log_prob": _FORWARD.format("actor_rollout_ref.rollout"),
    "ref": _FORWARD.format("actor_rollout_ref.ref"),
    "update": f"lower {_ACTOR}.ppo_max_token_len_per_gpu, or use more dies",
    "disk": "lower trainer.max_actor_ckpt_to_keep, or set trainer.save_freq=-1",
}
_ON_HOST = f"{_ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload"
MEGATRON_REMEDIES = {**REMEDIES, "update": f"set {_ON_HOST}=true, {REMEDIES['update']}"}


def make_verl_0_9_plan(config: Mapping[str, Any], model: Mapping[str, Any], machine: Machine) -> JobPlan | FsdpPlan:
    """Plan a resolved configuration that has passed `check_job` of `verl_plugin.jobs`.

    Raises:
        ValueError: a critic is trained, or Megatron's weights or optimizer stay on the die; neither is supported here.
    """
    if config["algorithm"]["adv_estimator"] == "gae":
        raise ValueError(
            "algorithm.adv_estimator=gae is invalid for a plan of the stack 2026, which has no critic. Set it to grpo."
        )
    staged, handed = _buckets(config)
    if config["actor_rollout_ref"]["actor"]["strategy"] != "megatron":
        plan = make_fsdp_plan(read_verl_0_9_fsdp_job(config, model), machine, remedies=REMEDIES)
        return replace(plan, device=replace(plan.device, phases=_with(plan.device.phases, 2 * staged + handed)))
    job_plan = make_job_plan(read_verl_0_9_job(config, model), machine, remedies=MEGATRON_REMEDIES)
    device, job = replace(job_plan.device, phases=_with(job_plan.device.phases, handed)), job_plan.job
    # An optimizer on the host keeps float32 gradients there, beside 12 bytes of state per element.
    gradients = device.optimizer // 3 if job.swaps_optimizer else 0
    # vLLM-Ascend sleeps at level 1: its weights are copied to the host.
    away = job_plan.host.away + (device.weights_rollout + gradients) * job.dies_per_node
    return replace(job_plan, device=device, host=replace(job_plan.host, away=away))


def _with(phases: Mapping[str, int], hand_over: int) -> dict[str, int]:
    """Return the phases, with the buffers of the weight transfer added to the reshard."""
    return {**phases, "reshard": phases["reshard"] + hand_over}


def _buckets(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes that alltoallv stages in each direction (0 without it), and of verl's bucket within a die."""
    rollout = config["actor_rollout_ref"]["rollout"]
    own = _alltoallv(rollout).get("bucket_megabytes", 0)
    return own << 20, rollout["checkpoint_engine"]["update_weights_bucket_megabytes"] << 20


def _alltoallv(rollout: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of the weight transfer."""
    return (rollout["engine_kwargs"]["vllm"].get("additional_config") or {}).get("alltoallv") or {}


def ulysses_parts(role: Mapping[str, Any]) -> int:
    """Return the number of FSDP ranks that share a sequence in verl's actor or reference.

    verl's older key, beside the group, wins if it is above 1.
    """
    older = role.get("ulysses_sequence_parallel_size") or 1
    return int(older if older > 1 else role["fsdp_config"].get("ulysses_sequence_parallel_size") or 1)


def read_verl_0_9_fsdp_job(config: Mapping[str, Any], model: Mapping[str, Any]) -> FsdpJob:
    """Read a job on FSDP2. Raises ValueError if the model has no layouts, or the rollout does not fit it."""
    node, data = config["actor_rollout_ref"], config["data"]
    actor, rollout = node["actor"], node["rollout"]
    dies, tp = _dies(config), rollout["tensor_model_parallel_size"]
    longest, table = data["max_prompt_length"] + data["max_response_length"], table_for(model)
    placement = RolloutPlacement(tp=tp, dp=1, ep=1, instances=dies // tp, shared_expert_replicated=False)
    elements = {name: prod(shape) for name, shape in table.shapes.items()}
    micro = sequences_of(actor, "", "ppo_", longest)
    replicas = dies // ulysses_parts(actor)
    return FsdpJob(
        sizes=sizes_of(model),
        elements=sum(elements.values()),
        output_layer=elements.get(_OUTPUT_LAYER, 0),
        layer=sum(size for name, size in elements.items() if name.startswith(_LAYER)),
        engine=Rank.of(table.vllm_ascend(placement, 0)).elements,
        dies=dies,
        rollout_tp=tp,
        itemsize=_itemsize(rollout),
        prompts=data["train_batch_size"],
        responses=rollout["n"],
        sequence_tokens=longest,
        response_tokens=data["max_response_length"],
        micro_update=micro,
        micro_old=sequences_of(rollout, "log_prob_", "log_prob_", longest),
        micro_reference=sequences_of(node["ref"], "log_prob_", "log_prob_", longest),
        entropy=actor["entropy_coeff"] != 0,
        accumulates=actor["ppo_mini_batch_size"] * rollout["n"] // replicas > micro,
        recomputes=node["model"]["enable_gradient_checkpointing"],
        away_parameters=actor["fsdp_config"]["param_offload"],
        away_optimizer=actor["fsdp_config"]["optimizer_offload"],
        forward_tokens=rollout["max_num_batched_tokens"],
        engine_sequences=rollout["max_num_seqs"],
        utilization=rollout["gpu_memory_utilization"],
        blocks=rollout["engine_kwargs"]["vllm"].get("num_gpu_blocks_override"),
        by_rows=True,
    )


def read_verl_0_9_job(config: Mapping[str, Any], model: Mapping[str, Any]) -> Job:
    """Read a job on Megatron-core. Raises ValueError if a placement has no layouts, or training stays on the die."""
    node, data = config["actor_rollout_ref"], config["data"]
    actor, rollout = node["actor"], node["rollout"]
    for key in ("param_offload", "optimizer_offload"):
        if not actor["megatron"][key]:
            raise ValueError(
                f"{_ACTOR}.megatron.{key}=false is invalid for a plan, in which training and rollout use the die in "
                "turn. Set it to true."
            )
    longest, table = data["max_prompt_length"] + data["max_response_length"], table_for(model)
    dies, staged, context = _dies(config), _buckets(config), actor["megatron"]["context_parallel_size"]
    return Job(
        sizes=sizes_of(model),
        table=table,
        train=_train_placement(actor["megatron"], stage_layers(actor["megatron"], table.layers), dies),
        rollout=_rollout_placement(rollout, dies),
        itemsize=_itemsize(rollout),
        prompts=data["train_batch_size"],
        responses=rollout["n"],
        sequence_tokens=longest,
        update_tokens=actor["ppo_max_token_len_per_gpu"] * context if actor["use_dynamic_bsz"] else None,
        micro_update=sequences_of(actor, "", "ppo_", longest, context),
        micro_reference=sequences_of(node["ref"], "log_prob_", "log_prob_", longest, context),
        engine_sequences=rollout["max_num_seqs"],
        forward_tokens=rollout["max_num_batched_tokens"],
        chunks_prompts=rollout["enable_chunked_prefill"],
        utilization=rollout["gpu_memory_utilization"],
        blocks=rollout["engine_kwargs"]["vllm"].get("num_gpu_blocks_override"),
        bucket_bytes=staged[0] or staged[1],
        dies_per_node=config["trainer"]["n_gpus_per_node"],
        recomputation=_recomputation(actor["megatron"]["override_transformer_config"]),
        saves_every=max(config["trainer"]["save_freq"], 0),
        keeps=config["trainer"]["max_actor_ckpt_to_keep"] or 0,
        swaps_optimizer=_optimizer_on_host(actor["optim"].get("override_optimizer_config") or {}),
        relays_weights=_alltoallv(rollout).get("dies_per_node") is not None,
        context=context,
        weighs_in_float32=True,  # the larger of the two; MindSpeed's options decide which one its layers do
    )


def _dies(config: Mapping[str, Any]) -> int:
    return int(config["trainer"]["nnodes"] * config["trainer"]["n_gpus_per_node"])


def _itemsize(rollout: Mapping[str, Any]) -> int:
    return 4 if rollout["dtype"] == "float32" else 2


def _optimizer_on_host(options: Mapping[str, Any]) -> bool:
    """Return whether Megatron-core keeps all of Adam's state on the host. Raises ValueError if only a part is there."""
    share = options.get("optimizer_offload_fraction", 0.0) if options.get("optimizer_cpu_offload") else 0.0
    if share not in (0, 1):
        key = f"{_ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction"
        raise ValueError(
            f"{key}={share} is invalid for a plan, which keeps the state in one place. Set it to 1.0 or 0.0."
        )
    return bool(share)


def stage_layers(megatron: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers of each pipeline stage: equal numbers, except for a configured first or last stage.

    Args:
        megatron: the `megatron` group of verl's configuration of the actor.
        layers: number of the model's layers.

    Raises:
        ValueError: the other stages cannot have equal numbers; the message names the key.
    """
    stages, given = megatron["pipeline_model_parallel_size"], megatron.get("override_transformer_config") or {}
    ends = [given.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    first, last = ([] if number is None else [number] for number in ends)
    between, left = stages - len(first + last), layers - sum(first + last)
    equal = left >= between and left % between == 0 if between > 0 else between == left == 0
    if not equal or min(first + last, default=1) < 1:
        beside = ", beside the first and the last one as given" if first + last else ""
        raise ValueError(
            f"{_ACTOR}.megatron.pipeline_model_parallel_size={stages} is invalid: {left} of {layers} layers do not "
            f"fill {between} stages evenly{beside}. Set override_transformer_config.num_layers_in_first_pipeline_stage "
            "and num_layers_in_last_pipeline_stage so that they do."
        )
    return (*first, *([left // between] * between if between else ()), *last)


def _train_placement(megatron: Mapping[str, Any], layers: tuple[int, ...], dies: int) -> TrainPlacement:
    """Return the training placement; whole experts are spread over tensor ranks too, MindSpeed's `moe_tp_extend_ep`."""
    tp, pp, ep = (megatron[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "expert_model"))
    whole = (megatron["expert_tensor_parallel_size"] or tp) == 1
    return TrainPlacement(
        tp=tp,
        pp=pp,
        ep=max(ep // tp, 1) if whole else ep,
        dp=dies // (tp * pp),
        num_layer_list=layers,
        moe_tp_extend_ep=whole,
    )


def _rollout_placement(rollout: Mapping[str, Any], dies: int) -> RolloutPlacement:
    tp, dp = rollout["tensor_model_parallel_size"], rollout["data_parallel_size"]
    size = tp * dp
    return RolloutPlacement(
        tp=tp,
        dp=dp,
        ep=size if rollout["expert_parallel_size"] > 1 else 1,
        instances=dies // size,
        shared_expert_replicated=False,
    )


def _recomputation(transformer: Mapping[str, Any]) -> Recomputation | None:
    granularity = transformer.get("recompute_granularity")
    if granularity is None:
        return None
    if granularity == "selective":
        return Recomputation("selective")
    return Recomputation("full", transformer["recompute_method"], transformer["recompute_num_layers"])
