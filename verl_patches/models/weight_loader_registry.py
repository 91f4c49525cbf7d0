"""Patch of verl's weight savers for the families that this project builds."""

from collections.abc import Callable
from typing import Any, NoReturn

from overlay import wrap
from verl_patches.features.compatibility.feature import OWN_MODELS


@wrap(
    "verl.models.weight_loader_registry:get_weight_saver",
    feature=OWN_MODELS,
    why="at the cluster's commit it rejects DeepSeek-V3, and so does every worker; later it gathers parameters of "
    "transformer_engine, which this model does not have",
    upstream="not forwarded: verl supports megatron-core 0.12 and later",
    remove_when="the pinned megatron-core has the attention and the routers of these families",
    evidence="executed",
)
def get_weight_saver(upstream: Callable[..., Callable[..., Any]], arch: str) -> Callable[..., Any]:
    from post_training.models.families import find_family

    family = find_family({"architectures": [arch]})
    if family is None or family.megatron is None:
        return upstream(arch)

    def reject(*args: Any, **kwargs: Any) -> NoReturn:
        """Raise in the place of verl's gathering of a HuggingFace checkpoint."""
        raise NotImplementedError(
            f"{arch} cannot be saved as a HuggingFace checkpoint by a run. Remove hf_model from "
            "actor_rollout_ref.actor.checkpoint.contents (docs/weights.md lists what can be saved)"
        )

    return reject
