"""Graph compilation for rollout weights whose memory is released and taken again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from overlay import ConfigurationError


def reject_captured_graphs(runner: Any) -> None:
    """Reject a vLLM-Ascend model runner that captures ACL graphs: unlike torchair's, they fix the addresses of weights.

    Raises:
        ConfigurationError: the runner captures ACL graphs.
    """
    if runner.use_aclgraph:
        raise ConfigurationError(
            "ACL graphs keep the addresses of weights, but "
            "actor_rollout_ref.overlay.residency.rollout_addresses=released frees them. Set it to reserved, or use "
            "actor_rollout_ref.rollout.enforce_eager=true or torchair graphs"
        )


@contextmanager
def weights_that_move() -> Iterator[None]:
    """Let graphs that torchair compiles within this context read the addresses of their weights at every run.

    vLLM-Ascend asks for `frozen_parameter`, with which a graph keeps the addresses from its compilation.
    """
    import torchair

    backend, cached = torchair.get_npu_backend, torchair.inference.cache_compile

    def moving(config: Any) -> Any:
        config.experimental_config.frozen_parameter = False
        return config

    def get_npu_backend(*, compiler_config: Any, **options: Any) -> Callable:
        return backend(compiler_config=moving(compiler_config), **options)

    def cache_compile(function: Callable, *, config: Any, **options: Any) -> Callable:
        return cached(function, config=moving(config), **options)

    torchair.get_npu_backend, torchair.inference.cache_compile = get_npu_backend, cache_compile
    try:
        yield
    finally:
        torchair.get_npu_backend, torchair.inference.cache_compile = backend, cached
