"""One line of a job's configuration, `+weight_transfer=alltoallv`, for all keys by which verl takes these weights.

Hydra imports each module of the namespace package `hydra_plugins` before it composes a configuration. The wheel puts
this one there. Until a job names the group, nothing else of the package is imported.
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
                # verl takes it where training and rollout have dies of their own, and nowhere else.
                "checkpoint_engine": {"backend": BACKEND, "custom_backend_module": BACKEND_MODULE},
            },
        }
    },
)
