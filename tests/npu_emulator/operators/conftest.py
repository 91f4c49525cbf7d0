"""In these tests whatever an operator computes has the shapes and dtypes that it gives to a graph."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch._library import simple_registry
from torch.utils._pytree import tree_leaves, tree_map

from npu_emulator.operators import registry


def _without_memory(value: object) -> object:
    return value.detach().to("meta") if isinstance(value, torch.Tensor) else value


def _forms(results: object) -> list[object]:
    tensors = [each for each in tree_leaves(results) if each is not None]
    return [(tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else each for each in tensors]


@pytest.fixture(autouse=True)
def results_have_the_shapes_of_graphs(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Compare the results of every operator that has a function for its shapes; returns which ones it compared."""
    compared: set[str] = set()
    host_function = registry._host_function

    def with_comparison(operator: registry.Operator) -> Callable:
        function = host_function(operator)
        registered = simple_registry.singleton.find(operator.name).fake_impl.kernel.func
        shapes = inspect.getclosurevars(registered).nonlocals["func"]  # torch wraps what it is given
        if shapes is operator.function:
            return function

        def run(*args, **kwargs):
            given = tree_map(_without_memory, (args, kwargs))
            results = function(*args, **kwargs)
            expected = _forms(shapes(*given[0], **given[1]))
            assert _forms(results) == expected, f"{operator.name}: a graph takes its results to be {expected}"
            compared.add(operator.name)
            return results

        return run

    monkeypatch.setattr(registry, "_host_function", with_comparison)
    return compared
