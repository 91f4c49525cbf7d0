"""torch._foreach_copy_, with which FSDP2 casts its shards, and aclnnForeachCopy, which converts between few types."""

from __future__ import annotations

import ctypes
from itertools import product

import pytest
import torch
import torch_npu  # noqa: F401

from npu_emulator import counters
from npu_emulator.cann import library
from tests.npu_emulator.documented import DTYPES
from tests.npu_emulator.operators.compare import refused

OPERATOR = "aclnnForeachCopy"
INVALID, ND = 161002, 2
FLOAT, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
TYPES = {
    "FLOAT": FLOAT, "FLOAT16": HALF, "BFLOAT16": BFLOAT16, "DOUBLE": torch.float64, "INT8": torch.int8,
    "UINT8": torch.uint8, "INT16": torch.int16, "INT32": torch.int32, "INT64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
# The columns of ops-nn v9.1.0, foreach/foreach_copy/op_host/foreach_copy_def.cpp, in which input and output differ.
CONVERTED = {("FLOAT", "BFLOAT16"), ("FLOAT", "FLOAT16"), ("FLOAT16", "FLOAT"), ("BFLOAT16", "FLOAT")}
# Halfway between neighbours, above and below an even one, in bfloat16 and float16; too large for float16; subnormal.
HARD = [
    1 + 2**-8,
    1 + 3 * 2**-8,
    1 + 2**-11,
    1 + 3 * 2**-11,
    -3.3e38,
    65520.0,
    6e-8,
    1e-40,
    -0.0,
    float("inf"),
    float("nan"),
]


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("NPU_EMULATOR_STRICT", "1")


def values(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return numbers that every type can represent, and for floating-point types also those that are hard to round."""
    if not dtype.is_floating_point:
        return torch.arange(20).remainder(2 if dtype == torch.bool else 100).to(dtype)
    drawn = torch.randn(500, generator=torch.Generator().manual_seed(seed))
    return torch.cat([drawn, torch.tensor(HARD)]).to(dtype)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def pointer(name: str, *arguments: object) -> ctypes.c_void_p:
    function = getattr(library(), name)
    function.restype = ctypes.c_void_p
    return ctypes.c_void_p(function(*arguments))


def list_of(tensor: torch.Tensor, dtype: str) -> ctypes.c_void_p:
    """Make a CANN tensor list with one vector on the device, which it does not own."""
    count, one = ctypes.c_uint64(1), (ctypes.c_int64 * 1)(1)
    shape = (ctypes.c_int64 * 1)(tensor.numel())
    made = pointer(
        "aclCreateTensor", shape, count, DTYPES[dtype], one, ctypes.c_int64(0), ND, shape, count,
        ctypes.c_void_p(tensor.data_ptr()),
    )  # fmt: skip
    return pointer("aclCreateTensorList", (ctypes.c_void_p * 1)(made), count)


def call(source: torch.Tensor, of_source: str, target: torch.Tensor, of_target: str) -> int:
    """Return CANN's status for a copy, bypassing torch_npu, which does not request most pairs of types."""
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    lists = list_of(source, of_source), list_of(target, of_target)
    code = library().aclnnForeachCopyGetWorkspaceSize(*lists, ctypes.byref(size), ctypes.byref(executor))
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    return code or library().aclnnForeachCopy(ctypes.c_void_p(), size, executor, stream)


def test_operator_converts_the_pairs_of_its_source_alone():
    taken = set()
    for of_source, of_target in product(TYPES, repeat=2):
        given = values(TYPES[of_source])
        target = torch.zeros(given.numel(), dtype=TYPES[of_target], device="npu")
        code = call(given.npu(), of_source, target, of_target)
        torch.npu.synchronize()
        if code:
            assert code == INVALID and not target.cpu().any()
        else:
            taken.add((of_source, of_target))
            assert same(target.cpu(), given.to(TYPES[of_target]))
    assert taken == CONVERTED | {(name, name) for name in TYPES}


@pytest.mark.parametrize(("source", "target"), [(TYPES[one], TYPES[other]) for one, other in sorted(CONVERTED)])
def test_shards_cast_as_by_torch_in_one_call(source, target):
    """Cast as FSDP2: torch 2.10, distributed/fsdp/_fully_shard/_fsdp_collectives.py, _get_param_all_gather_inputs."""
    shards = [values(source, seed) for seed in range(3)]
    sizes = [shard.numel() for shard in shards]
    results = []
    calls = counters.operator_calls().get(OPERATOR, 0)
    for device in ("npu", "cpu"):
        flat = torch.empty(sum(sizes), dtype=target, device=device)
        torch._foreach_copy_(torch.split(flat, sizes), [shard.to(device) for shard in shards])
        results.append(flat.cpu())
    assert counters.operator_calls()[OPERATOR] == calls + 1
    assert same(*results)


@pytest.mark.parametrize(
    ("source", "target"), [(HALF, BFLOAT16), (torch.float64, FLOAT), (torch.int32, FLOAT), (FLOAT, torch.int64)]
)
def test_other_pairs_copied_one_by_one(source, target):
    """op-plugin leaves other pairs to torch, which copies each tensor."""
    given = values(source)[:500]
    calls = counters.operator_calls().get(OPERATOR, 0)
    (copied,) = out = [torch.zeros(given.numel(), dtype=target, device="npu")]
    torch._foreach_copy_(out, [given.npu()])
    assert counters.operator_calls().get(OPERATOR, 0) == calls
    assert same(copied.cpu(), given.to(target))


def test_list_of_several_types_rejected():
    """op-plugin only checks that each pair can be converted, and passes targets of both types in one list."""
    targets = [torch.zeros(4, dtype=dtype, device="npu") for dtype in (HALF, BFLOAT16)]
    sources = [torch.ones(4, device="npu") for _ in targets]
    with refused("Tensor out must have the dtype of the first of its list, Half, and has BFloat16"):
        torch._foreach_copy_(targets, sources)
