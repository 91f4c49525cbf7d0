"""Checks of the groups that verl passes through: the arguments of vLLM's engine and of Megatron's configuration.

The known names are read from the installed sources without importing them, because an import takes longer than all
other checks; if a package is not installed, its names are not checked.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overlay import ConfigurationError
from post_training.plan.model_findings import OWN_TRANSFORMER_OPTIONS
from verl_patches.trainer.configuration_checks.names import nearest
from verl_patches.trainer.configuration_checks.schema.values import SEE
from verl_patches.trainer.configuration_checks.values import shown

ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
# Arguments that verl itself passes to the engine, and the key that each comes from, if any. Python rejects a call in
# which an argument is given twice.
GIVEN_BY_VERL = {
    "model": "actor_rollout_ref.model.path",
    "tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "dtype": "actor_rollout_ref.rollout.dtype",
    "enforce_eager": "actor_rollout_ref.rollout.enforce_eager",
    "gpu_memory_utilization": "actor_rollout_ref.rollout.gpu_memory_utilization",
    "max_model_len": "actor_rollout_ref.rollout.max_model_len",
    "load_format": "actor_rollout_ref.rollout.load_format",
    "disable_log_stats": "actor_rollout_ref.rollout.disable_log_stats",
    "max_num_batched_tokens": "actor_rollout_ref.rollout.max_num_batched_tokens",
    "enable_chunked_prefill": "actor_rollout_ref.rollout.enable_chunked_prefill",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "seed": "actor_rollout_ref.rollout.seed",
    "limit_mm_per_prompt": "actor_rollout_ref.rollout.limit_images",
    "distributed_executor_backend": None,
    "disable_custom_all_reduce": None,
    "disable_mm_preprocessor_cache": None,
    "skip_tokenizer_init": None,
    "enable_prefix_caching": None,
    "enable_sleep_mode": None,
}
_EXPERTS = "actor_rollout_ref.overlay.rollout.expert_parallel_size decides it"
# Arguments with which the engine would not run, or compute something else than training does: the values that change
# nothing, and why all others are rejected. verl leaves out a key whose value is null.
NOT_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "quantization": ((), "training sends bfloat16 weights after every update, and nothing quantises them again"),
    "kv_cache_dtype": (("auto",), "log-probs of a cache in another type differ from training's"),
    "enable_lora": ((False,), "every weight is trained, and reshard sends all of them"),
    "enable_prompt_adapter": ((False,), "training does not support prompt adapters"),
    "speculative_config": ((), "nothing trains the draft model"),
    "kv_transfer_config": ((), "prefill and decode share the dies of a training"),
    "pipeline_parallel_size": ((1,), "the rollout shares training's vLLM-Ascend workers, and has no stages"),
    "data_parallel_size": ((1,), _EXPERTS),
    "enable_expert_parallel": ((False,), _EXPERTS),
    "task": (("auto", "generate"), "a rollout generates"),
    "device": (("auto", "npu"), "training runs on NPUs"),
    "worker_cls": (("auto",), "training calls vLLM-Ascend's worker"),
    "model_impl": (("auto", "vllm"), "reshard only knows where vLLM's own models keep their weights"),
    "cpu_offload_gb": ((0,), "reshard writes to the dies, and would miss weights that vLLM keeps on the host"),
    "calculate_kv_scales": ((False,), "log-probs of a scaled cache differ from training's"),
    "num_scheduler_steps": ((1,), "only vLLM's first engine has them"),
    "hf_config_path": ((), "training and rollout are one model, that of actor_rollout_ref.model.path"),
    "tokenizer": ((), "training and rollout share the tokenizer of actor_rollout_ref.model.path"),
    "enable_multimodal_encoder_data_parallel": ((False,), "reshard sends each die its part of the vision tower"),
}
# Overrides that training reads too, or is compared with (`post_training/plan/rotary_findings.py`).
OVERRIDDEN_OF_A_MODEL = frozenset({"rope_scaling", "rope_theta", "max_position_embeddings"})
_TRANSFORMER = (
    ("core/model_parallel_config.py", "ModelParallelConfig"),
    ("core/transformer/transformer_config.py", "TransformerConfig"),
    ("core/transformer/transformer_config.py", "MLATransformerConfig"),
)


def check_engine_arguments(config: Mapping[str, Any]) -> None:
    """Check that vLLM's engine takes every given argument, and that verl does not pass the same one itself."""
    known = _fields("vllm", ("engine/arg_utils.py", "EngineArgs"))
    for name, value in (config["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"] or {}).items():
        if value is None:  # verl leaves such a key out
            continue
        if name in GIVEN_BY_VERL:
            key = GIVEN_BY_VERL[name]
            remedy = f"set {key} instead" if key else "remove it"
            raise ConfigurationError(f"{ENGINE}.{name}={value} is already passed to the engine by verl; {remedy}")
        if name in NOT_SUPPORTED and value not in NOT_SUPPORTED[name][0]:
            raise ConfigurationError(
                f"{ENGINE}.{name}={shown(value)} is invalid: {NOT_SUPPORTED[name][1]}. Remove it; {SEE}"
            )
        if name == "hf_overrides":
            _check_model_overrides(value)
        _require_known(ENGINE, name, known, "argument of vLLM's engine")


def _check_model_overrides(value: Any) -> None:
    others = sorted(set(value) - OVERRIDDEN_OF_A_MODEL) if isinstance(value, Mapping) else [shown(value)]
    if others:
        raise ConfigurationError(
            f"{ENGINE}.hf_overrides={shown(value)} is invalid: only the rollout would read {', '.join(others)}, and "
            "its model would differ from training's. Change config.json in actor_rollout_ref.model.path instead"
        )


def check_transformer_options(config: Mapping[str, Any]) -> None:
    """Check that Megatron's configuration of the model has every field that is overridden."""
    known = _fields("megatron", *_TRANSFORMER)
    trained = config["actor_rollout_ref"]
    roles = {
        "actor_rollout_ref.actor": trained["actor"],
        "actor_rollout_ref.ref": trained["ref"],
        "critic": config["critic"],
        "reward_model": config["reward_model"],
    }
    for role, values in roles.items():
        for name in values["megatron"]["override_transformer_config"]:
            group = f"{role}.megatron.override_transformer_config"
            _require_known(group, name, known and known | OWN_TRANSFORMER_OPTIONS, "field of Megatron's configuration")


def _require_known(group: str, name: str, known: frozenset[str], what: str) -> None:
    if known and name not in known:
        meant = nearest(f"{group}.{name}", [f"{group}.{each}" for each in known])
        advice = f"did you mean {meant}?" if meant else "remove it"
        raise ConfigurationError(f"unknown key {group}.{name}: no such {what}; {advice}")


@cache
def _fields(package: str, *classes: tuple[str, str]) -> frozenset[str]:
    """Return the annotated names in classes, given by file and name; empty if the package is not installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    found: set[str] = set()
    for file, wanted in classes:
        path = next(
            (Path(place, file) for place in spec.submodule_search_locations if Path(place, file).exists()), None
        )
        for node in ast.parse(path.read_text()).body if path else ():
            if isinstance(node, ast.ClassDef) and node.name == wanted:
                annotated = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                found |= {target.id for target in annotated if isinstance(target, ast.Name)}
    return frozenset(found)
