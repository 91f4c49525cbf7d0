"""The surroundings of a call: the state of the process that upstream would see, and the blocks open around the call."""

from __future__ import annotations

import ast
import contextvars
import hashlib
import inspect
import os
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FrameType, ModuleType
from typing import Any
from unittest.mock import NonCallableMock

_OPEN = (ast.With, ast.AsyncWith, ast.Try)


def open_blocks(inner: FrameType, outer: CodeType) -> list[str]:
    """Return the `with` and `try` statements open around a call, from its frame `inner` out to that of `outer`."""
    found, frame = [], inner
    while frame is not None:
        found += [f"{frame.f_code.co_name}: {line}" for line in _blocks_around(frame.f_code, frame.f_lineno)]
        if frame.f_code is outer:
            break
        frame = frame.f_back
    return found


def _blocks_around(code: CodeType, line: int) -> Iterator[str]:
    for first, last, text in _blocks(code):
        if first <= line <= last:
            yield text


@cache
def _blocks(code: CodeType) -> tuple[tuple[int, int, str], ...]:
    """Return first and last line of each block's body in a function, and the block's first line as text."""
    lines, start = inspect.getsourcelines(code)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    return tuple(
        (start + node.body[0].lineno - 1, start + node.body[-1].end_lineno - 1, lines[node.lineno - 1].strip())
        for node in ast.walk(tree)
        if isinstance(node, _OPEN)
    )


def state(given: Iterable[Any] = (), *modules: str) -> dict[str, Any]:
    """Return the state that a function can see of its process.

    This is torch's modes and random numbers, the environment, context variables and, by `OWNER.NAME`, the objects bound
    in torch, in the classes of `modules` (if imported) and in the mocks `given`.
    """
    import torch

    found = {
        "environment": dict(os.environ),
        "context variables": dict(contextvars.copy_context()),
        "filters of warnings": list(warnings.filters),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random numbers": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
    }
    owners = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.distributed": torch.distributed}
    owners |= {"torch.Tensor": torch.Tensor, "torch.nn.Module": torch.nn.Module}
    owners |= {"torch.optim.Optimizer": torch.optim.Optimizer}
    for name in modules:
        if module := sys.modules.get(name):
            owners[name] = module
            owners |= {f"{name}.{key}": value for key, value in vars(module).items() if isinstance(value, type)}
    for owner, holder in owners.items():
        # A module is bound in its package when it is first imported.
        bound = {key: value for key, value in vars(holder).items() if not isinstance(value, ModuleType)}
        found |= {f"{owner}.{key}": id(value) for key, value in bound.items()}
    for number, mock in enumerate(each for each in given if isinstance(each, NonCallableMock)):
        written = {key: value for key, value in vars(mock).items() if not key.startswith(("_", "method_calls"))}
        found |= {f"argument {number}.{key}": id(value) for key, value in written.items()}
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names at which two states differ."""
    nothing = object()
    return sorted(name for name in before | after if before.get(name, nothing) != after.get(name, nothing))
