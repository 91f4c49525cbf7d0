"""The keys of the batch-invariant mode, and checks of their combination with other keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from post_training.models.families import family_of
from post_training.report.run_folder import at
from verl_plugin.libraries import LIBRARIES_KEY, libraries_of
from verl_plugin.rollout import WORKER, WORKER_KEY
from verl_plugin.sentences import invalid

VARIABLE = "VLLM_BATCH_INVARIANT"
KEY = f"ray_kwargs.ray_init.runtime_env.env_vars.{VARIABLE}"
ATTENTION_KEY = "actor_rollout_ref.model.override_config.attn_implementation"
ATTENTION = "batch_invariant"
LIBRARY = "verl_plugin.batch_invariance.training"
_STRATEGY = "actor_rollout_ref.actor.strategy"
_ROLLOUT = "actor_rollout_ref.rollout"
_EAGER = f"{_ROLLOUT}.enforce_eager"
_GRAPHS = f"{_ROLLOUT}.engine_kwargs.vllm.compilation_config.cudagraph_mode"
_TENSOR_PARALLEL = f"{_ROLLOUT}.tensor_model_parallel_size"
_EXPERT_PARALLEL = f"{_ROLLOUT}.expert_parallel_size"
_FUSED = f"{_ROLLOUT}.engine_kwargs.vllm.additional_config.enable_fused_mc2"
_FEW_DIES = 15
"""Most dies over which vLLM-Ascend 0.23 gathers tokens of experts on A2, whatever their number is."""
_QUANTIZATION = (f"{_ROLLOUT}.quantization", f"{_ROLLOUT}.engine_kwargs.vllm.quantization")
EXPERTS_FAMILIES = ("qwen3_moe",)
"""`model_type` of the mixtures whose experts verl computes on NPUs with the rollout's operators."""
# verl 0.9.1 takes it from both places.
ULYSSES = tuple(
    f"actor_rollout_ref.{role}{group}.ulysses_sequence_parallel_size"
    for role in ("actor", "ref")
    for group in ("", ".fsdp_config")
)
_SWITCH = {"0": False, "1": True}


@dataclass(frozen=True)
class BatchInvariance:
    """The batch-invariant mode, off by default.

    Attributes:
        rollout: log-probs of the rollout do not depend on the rest of the batch. This is upstream's mode, set by an
            environment variable of vLLM's processes, and this project's worker, which replaces the products that
            upstream leaves out.
        training: a training forward sums in the same order as that rollout.
    """

    rollout: bool = False
    training: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BatchInvariance:
        """Read the keys from a whole job.

        Raises:
            ValueError: the rollout's key is neither 0 nor 1.
        """
        value = at(config, KEY)
        if value is not None and str(value) not in _SWITCH:
            raise ValueError(invalid(KEY, value, "vLLM reads a number there", "'1' or '0'"))
        return cls(value is not None and _SWITCH[str(value)], at(config, ATTENTION_KEY) == ATTENTION)


def invariance_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each invalid key of the mode, whatever the model is."""
    try:
        mode = BatchInvariance.from_config(config)
    except ValueError as error:
        yield str(error)
        return
    graphs = at(config, _GRAPHS)
    if mode.rollout and not at(config, _EAGER) and str(graphs) not in ("PIECEWISE", "NONE"):
        reason = f"{KEY}=1 replaces the attention, but whole graphs capture another one"
        yield invalid(_GRAPHS, graphs, reason, f"PIECEWISE, or {_EAGER} to true")
    libraries, strategy = libraries_of(config), at(config, _STRATEGY)
    if not mode.training:
        return
    if LIBRARY not in libraries:
        yield invalid(LIBRARIES_KEY, libraries, f"{ATTENTION_KEY}={ATTENTION} is registered there", f"[..., {LIBRARY}]")
    if not mode.rollout:
        yield invalid(
            ATTENTION_KEY, ATTENTION, f"the rollout sums in another order without {KEY}=1", "another attention"
        )
    if strategy != "fsdp2":
        yield invalid(ATTENTION_KEY, ATTENTION, f"{strategy} has its own attention", "null")
    for key in ULYSSES:
        if (parts := at(config, key) or 1) != 1:
            yield invalid(key, parts, f"{ATTENTION_KEY}={ATTENTION} sees only a rank's part of a sequence", "1")
    dies = at(config, _TENSOR_PARALLEL)
    if dies != 1:
        reason = f"with {ATTENTION_KEY}={ATTENTION} training does not split sums over dies"
        yield invalid(_TENSOR_PARALLEL, dies, reason, "1")


def invariance_model_problems(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the mode does not work with `model`, the values of its config.json."""
    mode = BatchInvariance.from_config(config)
    if not mode.rollout:
        return
    if family_of(model).reads_images:
        yield invalid(KEY, 1, "the mode was not run with a vision tower, whose attention sees all of an image", "0")
    has_experts = bool(model.get("num_experts") or model.get("n_routed_experts"))
    # transformers' Qwen2 has biases whatever its config.json says.
    has_biases = bool(model.get("attention_bias")) or model.get("model_type") == "qwen2"
    worker = at(config, WORKER_KEY)
    if (has_experts or has_biases) and worker != WORKER:
        left_out = "experts (npu_grouped_matmul)" if has_experts else "projections with biases (aten.linear)"
        yield invalid(WORKER_KEY, worker, f"with {KEY}=1 vLLM-Ascend leaves out the products of {left_out}", WORKER)
    if model.get("kv_lora_rank"):
        yield invalid(KEY, 1, "latent attention calls operators that vLLM-Ascend 0.23 does not replace", "0")
    for key in _QUANTIZATION if has_experts else ():
        if at(config, key):
            yield invalid(key, at(config, key), f"with {KEY}=1 quantised experts have no invariant products", "null")
    if has_experts:
        yield from _exchange_problems(config)
    if mode.training and has_experts and model.get("model_type") not in EXPERTS_FAMILIES:
        reason = f"training adds up the experts of {model.get('model_type')} in another order than the rollout"
        yield invalid(ATTENTION_KEY, ATTENTION, reason, "null")


def _exchange_problems(config: Mapping[str, Any]) -> Iterator[str]:
    dies, fused = at(config, _EXPERT_PARALLEL), at(config, _FUSED)
    if dies > _FEW_DIES:
        reason = f"with {KEY}=1 a neighbour's tokens must not decide by which operators experts are exchanged"
        yield invalid(_EXPERT_PARALLEL, dies, reason, f"{_FEW_DIES} or less")
    if fused:
        yield invalid(_FUSED, fused, f"with {KEY}=1 one operator multiplies and exchanges, which is not replaced", "0")
