"""The keys of the batch-invariant mode, and checks of their combination with other keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from post_training.report.run_folder import at
from verl_plugin.sentences import invalid

VARIABLE = "VLLM_BATCH_INVARIANT"
KEY = f"ray_kwargs.ray_init.runtime_env.env_vars.{VARIABLE}"
ATTENTION_KEY = "actor_rollout_ref.model.override_config.attn_implementation"
ATTENTION = "batch_invariant"
LIBRARY = "verl_plugin.batch_invariance.training"
_LIBRARIES = "actor_rollout_ref.model.external_lib"
_STRATEGY = "actor_rollout_ref.actor.strategy"
_ROLLOUT = "actor_rollout_ref.rollout"
_EAGER = f"{_ROLLOUT}.enforce_eager"
_GRAPHS = f"{_ROLLOUT}.engine_kwargs.vllm.compilation_config.cudagraph_mode"
_SWITCH = {"0": False, "1": True}


@dataclass(frozen=True)
class BatchInvariance:
    """The batch-invariant mode, off by default.

    Attributes:
        rollout: log-probs of the rollout do not depend on the rest of the batch. This is upstream's mode, set by an
            environment variable of vLLM's processes.
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
    libraries, strategy = at(config, _LIBRARIES) or [], at(config, _STRATEGY)
    if not mode.training:
        return
    if LIBRARY not in ([libraries] if isinstance(libraries, str) else libraries):
        yield invalid(_LIBRARIES, libraries, f"{ATTENTION_KEY}={ATTENTION} is registered there", f"[..., {LIBRARY}]")
    if not mode.rollout:
        yield invalid(
            ATTENTION_KEY, ATTENTION, f"the rollout sums in another order without {KEY}=1", "another attention"
        )
    if strategy != "fsdp2":
        yield invalid(ATTENTION_KEY, ATTENTION, f"{strategy} has its own attention", "null")


def invariance_model_problems(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the mode does not work with `model`, the values of its config.json."""
    mode = BatchInvariance.from_config(config)
    # transformers' Qwen2 has biases whatever its config.json says.
    if mode.training and (model.get("attention_bias") or model.get("model_type") == "qwen2"):
        reason = "the model's projections have biases, but training only replaces products without one (aten::matmul)"
        yield invalid(ATTENTION_KEY, ATTENTION, reason, "null")
    if not mode.rollout:
        return
    if model.get("num_experts") or model.get("n_routed_experts"):
        yield invalid(KEY, 1, "vLLM-Ascend 0.23 does not replace the products of experts (npu_grouped_matmul)", "0")
