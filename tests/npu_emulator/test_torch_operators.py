"""torch's own samples of its operators (OpInfo): forward and gradient on the NPU equal those on the CPU.

What is left out, and why, is in LEFT_OUT; everything else of torch's list has to pass.
"""

import importlib.util
import sys
import types
import unittest
import warnings

import pytest
import torch
import torch_npu  # noqa: F401
from torch.utils._pytree import tree_leaves, tree_map

pytestmark = pytest.mark.slow

SAMPLES = 2
LEAST_TESTED = 660
LEFT_OUT = {
    "memory that nobody has written": [
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    ],
    "sparse tensors are not emulated": ["sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"],
    "the samples name the CPU themselves": ["to"],
    "takes indices on the CPU only": ["tensor_split"],
    "the samples look past the end of a view, which a copy to the device does not keep": ["as_strided.partial_views"],
    "CUDA only": [
        "jiterator_unary", "jiterator_binary", "jiterator_4inputs_with_extra_args", "jiterator_binary_return_by_ref",
        "jiterator_2inputs_2outputs", "torch._scaled_mm", "torch.ops.aten._flash_attention_forward",
        "torch.ops.aten._efficient_attention_forward", "nn.functional.batch_norm.without_cudnn",
    ],
    "no sample in float32 or int64": ["nn.functional.silu.complex", "view_as_real", "imag", "istft"],
}  # fmt: skip


def operator_list():
    """torch's list. Its module imports expecttest, which it needs for nothing that is used here."""
    if importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}


def run(op, sample, device: str) -> list[torch.Tensor]:
    """Results and gradients of one sample on a device, on the host."""
    torch.manual_seed(0)
    torch.npu.manual_seed(0)

    def move(value):
        return value.detach().to(device).requires_grad_(value.requires_grad) if torch.is_tensor(value) else value

    args, kwargs = tree_map(move, ((sample.input, *sample.args), sample.kwargs))
    if "device" in kwargs:
        kwargs["device"] = device
    results = [value for value in tree_leaves(op(*args, **kwargs)) if torch.is_tensor(value)]
    assert all(value.device.type == device for value in results), "a result on another device"
    leaves = [value for value in tree_leaves((args, kwargs)) if torch.is_tensor(value) and value.requires_grad]
    losses = [value.abs().sum() for value in results if value.requires_grad]
    gradients = torch.autograd.grad(losses, leaves, allow_unused=True) if losses and leaves else ()
    return [value.detach().cpu() for value in (*results, *gradients) if value is not None]


def difference(op) -> str | None:
    """What is wrong with an operator on the NPU; None if nothing is."""
    torch.manual_seed(0)
    dtype = torch.float32 if torch.float32 in op.dtypes else torch.int64
    samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype == torch.float32)
    try:
        for _, sample in zip(range(SAMPLES), samples, strict=False):
            torch.testing.assert_close(run(op, sample, "npu"), run(op, sample, "cpu"), equal_nan=True)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


@pytest.mark.filterwarnings("ignore")
def test_operators_equal_the_cpu():
    left_out = {name for names in LEFT_OUT.values() for name in names}
    operators = operator_list()
    assert left_out <= set(operators)
    tested = {name: op for name, op in operators.items() if name not in left_out}
    wrong = {}
    for name, op in tested.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = difference(op)
        if found:
            wrong[name] = found
    assert not wrong
    assert len(tested) >= LEAST_TESTED


def test_a_wrong_kernel_would_be_noticed():
    class Wrong:
        dtypes = {torch.float32}
        supports_autograd = True

        def sample_inputs(self, *args, **kwargs):
            yield types.SimpleNamespace(input=torch.ones(2, requires_grad=True), args=(), kwargs={})

        def __call__(self, x):
            return x * (2 if x.is_npu else 3)

    assert "not close" in difference(Wrong())
