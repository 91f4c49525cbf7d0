"""Whether a job trains with MindSpeed's layers, and what they would compute wrong.

Imports nothing of MindSpeed, which a machine that checks a job does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from post_training.report.run_folder import at
from verl_plugin.libraries import libraries_of
from verl_plugin.sentences import invalid

LAYERS = "verl_plugin.mindspeed"
_MEGATRON = "actor_rollout_ref.actor.megatron"
OTHER_LAYERS = "verl_plugin.megatron_core"
_OVERLAP = f"{_MEGATRON}.override_transformer_config.moe_shared_expert_overlap"


def trains_with_mindspeed(config: Mapping[str, Any]) -> bool:
    """Whether a job on Megatron-core loads MindSpeed's layers and no others."""
    libraries = libraries_of(config)
    return LAYERS in libraries and OTHER_LAYERS not in libraries


def overlap_problem(overlaps: object, tensor_parallel_size: int) -> str:
    """Return why shared experts cannot overlap with the exchange of tokens; empty if they can, or do not.

    On several tensor parallel ranks MindSpeed core_r0.16.0 gathers their tokens twice, and training hangs or computes
    something else: docs/upstream/mindspeed-shared-expert-overlap.md.
    """
    if not overlaps or tensor_parallel_size == 1:
        return ""
    reason = f"MindSpeed gathers the tokens of shared experts twice with TP{tensor_parallel_size}"
    return invalid(_OVERLAP, overlaps, reason, "false")


def overlap_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problem of a job that asks for the overlap.

    Args:
        config: resolved configuration of the whole job, trained with Megatron-core.
    """
    if not trains_with_mindspeed(config):
        return
    problem = overlap_problem(at(config, _OVERLAP), at(config, f"{_MEGATRON}.tensor_model_parallel_size"))
    if problem:
        yield problem
