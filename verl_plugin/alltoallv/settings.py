"""Options of the weight transfer, which vLLM's own configuration carries to its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

SETTINGS_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.alltoallv"
VERL_BUCKET_KEY = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
EXTENSION_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"
EXTENSION = "verl_plugin.alltoallv.worker.AlltoallvExtension"
LIBRARY_KEY = "actor_rollout_ref.model.external_lib"
LIBRARY = "verl_plugin.alltoallv.engines"
BACKEND = "alltoallv"
BACKEND_MODULE = "verl_plugin.alltoallv.checkpoint_engine"


@dataclass(frozen=True)
class AlltoallvSettings:
    """The group `actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.alltoallv`.

    Attributes:
        bucket_megabytes: upper bound of a training rank's staging memory in each direction, in MiB. verl's own bucket
            (rollout.checkpoint_engine.update_weights_bucket_megabytes) carries it to the worker and comes on top. With
            IPC, a verl bucket of 1 spares that memory and a copy: verl then hands over the staging memory itself.
        dies_per_node: number of dies in each node, in the order of ranks. Bytes that several rollout dies of a node
            need then enter the node once and are passed on inside it. None treats all links alike.
        verify: compare all weights of every update bit for bit with training's. This broadcasts the whole model.
        discard_on_sleep: a sleeping worker gives up the weights that the next update writes. Otherwise they are copied
            to the host and back, as upstream does on NPUs.
    """

    bucket_megabytes: int = 1024
    dies_per_node: int | None = None
    verify: bool = False
    discard_on_sleep: bool = True

    def __post_init__(self) -> None:
        sizes = {"bucket_megabytes": "a bucket needs at least 1 MiB", "dies_per_node": "a node needs at least one die"}
        for name, reason in sizes.items():
            size = getattr(self, name)
            if size is None and name == "dies_per_node":
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"{SETTINGS_KEY}.{name}={size!r} is invalid: {reason}. Set it to a whole number above 0."
                )
        for name in ("verify", "discard_on_sleep"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{SETTINGS_KEY}.{name}={value!r} is invalid. Set it to true or false.")

    @classmethod
    def from_additional_config(cls, additional_config: Mapping[str, Any] | None) -> AlltoallvSettings:
        """Read vLLM's `additional_config`.

        Raises:
            ValueError: an option does not exist or has an invalid value.
        """
        values = (additional_config or {}).get("alltoallv") or {}
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"{SETTINGS_KEY}.{name} is invalid: no such option. Set one of {', '.join(known)}.")
        return cls(**values)
