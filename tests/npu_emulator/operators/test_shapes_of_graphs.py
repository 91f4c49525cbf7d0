"""The comparison of conftest.py, which all tests of this folder make, is made and would notice."""

from types import SimpleNamespace

import pytest
import torch
import torch_npu
from torch._library import simple_registry

NAME = "npu::npu_moe_compute_expert_tokens"


def call() -> list[int]:
    experts = torch.tensor([0, 2, 2], dtype=torch.int32, device="npu")
    return torch_npu.npu_moe_compute_expert_tokens(experts, 4).tolist()


def test_results_are_compared_with_what_a_graph_is_told(results_have_the_shapes_of_graphs):
    assert call() == [1, 1, 3, 3] and results_have_the_shapes_of_graphs == {NAME}


@pytest.mark.parametrize("shape, dtype", [((5,), torch.int32), ((4,), torch.int64)])
def test_a_graph_that_is_told_something_else_is_noticed(shape, dtype, monkeypatch):
    def told(func):
        return lambda *args: func(*args)

    other = SimpleNamespace(func=told(lambda experts, count: experts.new_empty(shape, dtype=dtype)))
    monkeypatch.setattr(simple_registry.singleton.find(NAME).fake_impl, "kernel", other)
    with pytest.raises(AssertionError, match=f"{NAME}: a graph takes its results to be"):
        call()
