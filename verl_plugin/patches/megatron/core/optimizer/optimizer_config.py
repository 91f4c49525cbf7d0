"""Megatron-core compares the version of TransformerEngine where there is none."""

from __future__ import annotations

from collections.abc import Callable

from overlay import wrap
from verl_plugin.features.megatron_core.feature import MEGATRON_CORE


@wrap(
    "megatron.core.optimizer.optimizer_config:is_te_min_version",
    feature=MEGATRON_CORE,
    why="without TransformerEngine the version is None and comparing it is a TypeError, so "
    "`use_precision_aware_optimizer` cannot be set, although the optimizer of `optimizer_cpu_offload` supports it "
    "without TransformerEngine. `OptimizerConfig.__post_init__` calls it by name, and verl builds that class "
    "itself",
    upstream="docs/upstream/megatron-core-hybrid-optimizer-resume.md",
    remove_when="the pinned Megatron-core compares versions only where TransformerEngine is installed",
    relies_on=(
        "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
        "megatron.core.utils:get_te_version",
    ),
    evidence="executed",
    only_here=True,
)
def is_te_min_version(upstream: Callable[..., bool], version: str, check_equality: bool = True) -> bool:
    from megatron.core.utils import get_te_version

    return get_te_version() is not None and upstream(version, check_equality)
