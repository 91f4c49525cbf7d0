"""Compilation with a cache on disk. Here nothing is kept: the graph is captured again in every process."""

from collections.abc import Callable

import torch

from .backend import get_npu_backend
from .configuration import CompilerConfig


def cache_compile(
    func: Callable,
    *,
    config: CompilerConfig | None = None,
    backend=None,
    dynamic: bool = True,
    cache_dir: str | None = None,
    global_rank: int | None = None,
    tp_rank: int | None = None,
    pp_rank: int | None = None,
    custom_decompositions: dict | None = None,
    ge_cache: bool = False,
    **options,
) -> Callable:
    """`func` compiled; `options` go to torch.compile. No files are written to `cache_dir`."""
    backend = backend or get_npu_backend(compiler_config=config, custom_decompositions=custom_decompositions)
    return torch.compile(func, backend=backend, dynamic=dynamic, **options)
