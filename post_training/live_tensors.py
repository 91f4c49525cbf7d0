"""The live tensors of a Megatron training model, of its optimizer and of a vLLM model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def parameter_tensors(chunks: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers of model chunks, with the flat buffers in which Megatron's DDP keeps parameters."""
    for chunk in chunks:
        for flat in _flat_buffers(chunk):
            if flat.param_data is not None:
                yield flat.param_data
        module = chunk.module if _flat_buffers(chunk) else chunk
        yield from module.parameters()
        yield from module.buffers()


def gradient_tensors(chunks: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the flat gradient buffers of Megatron's DDP."""
    for chunk in chunks:
        for flat in _flat_buffers(chunk):
            yield flat.grad_data


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield main parameters and existing state of a Megatron optimizer, or of all optimizers in a chain."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _flat_buffers(chunk: torch.nn.Module) -> list[Any]:
    """Return Megatron's parameter and gradient buffers; empty for a chunk without its DDP. DDP keeps them in the
    attribute `buffers`, which is a method of an ordinary module."""
    dense = vars(chunk).get("buffers", [])
    return [*dense, *vars(chunk).get("expert_parallel_buffers", [])]
