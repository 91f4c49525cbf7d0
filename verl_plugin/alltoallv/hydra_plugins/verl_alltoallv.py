"""The override `+weight_transfer=alltoallv`, which sets all keys with which verl takes weights by alltoallv.

Hydra imports each module of the namespace package `hydra_plugins` before it composes a configuration. The wheel puts
this module there. Until a job names the group, no other module of the package is imported except `settings`.
"""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from verl_plugin.alltoallv.settings import BACKEND, BACKEND_MODULE, EXTENSION, LIBRARY

ConfigStore.instance().store(
    group="weight_transfer",
    name="alltoallv",
    package="_global_",
    provider="verl-alltoallv",
    node={
        "actor_rollout_ref": {
            "model": {"external_lib": LIBRARY},
            "rollout": {
                "engine_kwargs": {"vllm": {"worker_extension_cls": EXTENSION}},
                # verl uses it only if training and rollout have dies of their own.
                "checkpoint_engine": {"backend": BACKEND, "custom_backend_module": BACKEND_MODULE},
            },
        }
    },
)
