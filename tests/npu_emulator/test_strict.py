"""Strict mode refuses what the documentation forbids and names operator, argument and rule; otherwise it computes."""

import inspect
import subprocess
import sys

import pytest
import torch
import torch_npu

from npu_emulator import strict
from npu_emulator.operators import emulated, exposed

on = {"device": "npu"}
half = {"device": "npu", "dtype": torch.bfloat16}
training = exposed("npu_extension")


def gating(rows=4, experts=8):
    return torch.zeros(rows, 2, dtype=torch.int32, **on), torch.zeros(rows, 2, dtype=torch.int32, **on), experts


HALF = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16, **on)


def infer(**options):
    return torch_npu.npu_fused_infer_attention_score(HALF, HALF, HALF, input_layout="BNSD", **options)


def latent_cache(dtype, mode):
    kv, gamma, table = (torch.ones(shape, dtype=dtype, **on) for shape in ((1, 1, 1, 576), (512,), (1, 1, 1, 64)))
    caches = [torch.zeros(2, 16, 1, size, dtype=dtype, **on) for size in (64, 512)]
    return torch_npu.npu_kv_rmsnorm_rope_cache(
        kv, gamma, table, table, torch.tensor([3], **on), *caches, cache_mode=mode
    )


def dispatch(dtype, numbers, experts):
    x, chosen = torch.ones(2, 4, dtype=dtype, **on), torch.zeros(2, 1, dtype=numbers, **on)
    return torch_npu.npu_moe_distribute_dispatch(x, chosen, "nobody", 2, 0, experts)


FORBIDDEN = {
    "npu::npu_rms_norm: gamma must have the dtype of x or be float32": lambda: torch_npu.npu_rms_norm(
        torch.ones(2, 4, dtype=torch.bfloat16, **on), torch.ones(4, dtype=torch.float16, **on)
    ),
    "npu::npu_rms_norm: x must be float16 or bfloat16 or float32": lambda: torch_npu.npu_rms_norm(
        torch.ones(2, 4, dtype=torch.float64, **on), torch.ones(4, dtype=torch.float64, **on)
    ),
    "npu::npu_rms_norm: x must have 2 to 8 dimensions": lambda: torch_npu.npu_rms_norm(
        torch.ones(4, **on), torch.ones(4, **on)
    ),
    "npu::npu_swiglu: x must have an even size in dim": lambda: torch_npu.npu_swiglu(torch.ones(2, 3, **on)),
    "npu::npu_rotary_mul: x must have 4 dimensions": lambda: torch_npu.npu_rotary_mul(*[torch.ones(2, 4, **on)] * 3),
    "npu::npu_moe_init_routing: expert_idx must be int32": lambda: torch_npu.npu_moe_init_routing(
        torch.ones(4, 2, **on), gating()[0], gating()[1].long(), 4
    ),
    "npu::npu_moe_finalize_routing: scales must have the dtype of expanded_permuted_rows": lambda: (
        torch_npu.npu_moe_finalize_routing(
            torch.ones(2, 3, dtype=torch.bfloat16, **on), None, None, None, torch.ones(1, 2, **on),
            torch.tensor([0, 1], dtype=torch.int32, **on), torch.zeros(1, 2, dtype=torch.int32, **on),
        )
    ),
    "npu::npu_grouped_matmul_add_: x must be float16 or bfloat16": lambda: torch_npu.npu_grouped_matmul_add_(
        torch.zeros(2, 2, **on), *[torch.ones(3, 2, **on)] * 2, torch.tensor([3], **on)
    ),
    "npu::npu_grouped_matmul_add_: total must be float32": lambda: torch_npu.npu_grouped_matmul_add_(
        torch.zeros(2, 2, **half), *[torch.ones(3, 2, **half)] * 2, torch.tensor([3], **on)
    ),
    "npu::npu_grouped_matmul_add_: group_list must add up": lambda: torch_npu.npu_grouped_matmul_add_(
        torch.zeros(2, 2, **on), *[torch.ones(3, 2, **half)] * 2, torch.tensor([2], **on)
    ),
    "npu::npu_grouped_matmul: group_list must add up to the rows of x or fewer": lambda: torch_npu.npu_grouped_matmul(
        [torch.ones(4, 3, **on)], [torch.ones(1, 3, 2, **on)], group_list=torch.tensor([5], **on), group_type=0,
        split_item=3,
    ),
    "npu::npu_fusion_attention: atten_mask must be [2048, 2048]": lambda: torch_npu.npu_fusion_attention(
        *[torch.ones(1, 1, 4, 8, **on)] * 3, 1, "BNSD", atten_mask=torch.ones(4, 4, dtype=torch.bool, **on),
        sparse_mode=2,
    ),
    "npu::npu_fusion_attention: sparse_mode 1 to 4 needs atten_mask": lambda: torch_npu.npu_fusion_attention(
        *[torch.ones(1, 1, 4, 8, **on)] * 3, 1, "BNSD", sparse_mode=3
    ),
    "npu_extension::npu_gmm: x must hold float16 or bfloat16 matrices": lambda: training["npu_gmm"](
        [torch.ones(3, 2, **on)], [torch.ones(1, 2, 2, **on)], [], [3], 0, 0
    ),
    "npu_extension::npu_gmm: weight must have the dtype of x": lambda: training["npu_gmm"](
        [matrix(3, 4)], [matrix(2, 4, 5, dtype=torch.float32)], [], [2, 3], 0, 0
    ),
    "npu_extension::npu_gmm: group_list must add up to the rows of x": lambda: training["npu_gmm"](
        [torch.ones(3, 2, **half)], [torch.ones(1, 2, 2, **half)], [], torch.tensor([2], **on), 0, 1
    ),
    "npu_extension::npu_groupmatmul_add_fp32: grad must be float32": lambda: training["npu_groupmatmul_add_fp32"](
        torch.ones(3, 2, **half), torch.ones(3, 2, **half), torch.tensor([3], **on), torch.ones(1, 2, 2, **half)
    ),
    "npu_extension::npu_matmul_add_fp32: weight must have the dtype of x": lambda: training["npu_matmul_add_fp32"](
        torch.ones(3, 2, **half), torch.ones(3, 2, **on), torch.ones(2, 2, **on)
    ),
    "npu::npu_moe_token_permute: tokens must be bfloat16": lambda: torch_npu.npu_moe_token_permute(
        torch.ones(3, 2, **on), torch.zeros(3, dtype=torch.int32, **on)
    ),
    "npu_extension::npu_moe_token_permute: tokens must be bfloat16": lambda: training["npu_moe_token_permute"](
        torch.ones(3, 2, **on), torch.zeros(3, dtype=torch.int32, **on)
    ),
    "npu_extension::npu_moe_token_unpermute: sorted_indices must be int32": lambda: training["npu_moe_token_unpermute"](
        torch.ones(3, 2, **half), torch.arange(3, **on)
    ),
    "npu_extension::npu_rotary_position_embedding: sin must have the shape of cos": lambda: training[
        "npu_rotary_position_embedding"
    ](torch.ones(3, 2, 2, 4, **on), torch.ones(3, 2, 1, 4, **on), torch.ones(3, 1, 1, 4, **on)),
    "npu_extension::npu_ring_attention_update: layout must be one of SBH, TND": lambda: training[
        "npu_ring_attention_update"
    ](*[torch.ones(1, 1, 1, **on), *[torch.ones(1, 1, 1, 8, **on)] * 2] * 2, None, "BSH"),
    "npu_extension::npu_apply_fused_adamw_v2: exp_avg must have the dtype of param": lambda: training[
        "npu_apply_fused_adamw_v2"
    ](torch.ones(2, **on), torch.ones(2, **on), torch.ones(2, **half), torch.ones(2, **on), None,
      torch.tensor([1], **on), 0.1, 0.9, 0.9, 0.0, 1e-8, False, False),
    "atb::_npu_reshape_and_cache: slot_indices must be int32": lambda: torch_npu._npu_reshape_and_cache(
        *[torch.ones(1, 1, 4, dtype=torch.bfloat16, **on)] * 2,
        *[torch.ones(1, 2, 1, 4, dtype=torch.bfloat16, **on)] * 2,
        torch.tensor([0], **on),
    ),
    "npu::npu_interleave_rope: x must have 64 elements in its last dimension": lambda: torch_npu.npu_interleave_rope(
        *[torch.ones(2, 1, 1, 4, dtype=torch.bfloat16, **on)] * 3
    ),
    "npu::npu_kv_rmsnorm_rope_cache: kv must be float16 or bfloat16": lambda: latent_cache(torch.float32, "PA"),
    "npu::npu_kv_rmsnorm_rope_cache: index must name beginnings of blocks": lambda: latent_cache(
        torch.bfloat16, "PA_BLK_NZ"
    ),
    "npu::npu_fused_infer_attention_score: query_rope needs key_rope": lambda: infer(query_rope=HALF[..., :0]),
    "npu::npu_fused_infer_attention_score: block_size must be a multiple of 16 up to 512": lambda: infer(block_size=8),
    "npu::npu_fused_infer_attention_score: atten_mask must be [2048, 2048]": lambda: infer(
        sparse_mode=3, atten_mask=torch.ones(4, 4, dtype=torch.bool, **on)
    ),
    "npu::npu_moe_gating_top_k: k_group must be at most group_count": lambda: torch_npu.npu_moe_gating_top_k(
        torch.ones(2, 8, **on), 2, k_group=2, group_count=1
    ),
    "npu::npu_moe_distribute_dispatch: expert_ids must be int32": lambda: dispatch(torch.bfloat16, torch.int64, 8),
    "npu::npu_moe_distribute_dispatch: x must be float16 or bfloat16": lambda: dispatch(torch.float32, torch.int32, 8),
    "npu::npu_moe_distribute_dispatch: moe_expert_num must be a multiple": lambda: dispatch(
        torch.bfloat16, torch.int32, 7
    ),
}  # fmt: skip
NEEDS_A_GROUP = "npu_moe_distribute"
CANNOT_COMPUTE = (
    "npu_gmm: weight must have the dtype of x",
    "even size",
    NEEDS_A_GROUP,
    "query_rope",
    "total must be float32",
    "or fewer",
)


@pytest.mark.parametrize("message", FORBIDDEN)
def test_forbidden_inputs_are_named(message):
    with strict.enabled(), pytest.raises(strict.ForbiddenInput) as raised:
        FORBIDDEN[message]()
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("message", FORBIDDEN)
def test_without_strict_mode_the_same_inputs_compute(message):
    if not any(part in message for part in CANNOT_COMPUTE):
        FORBIDDEN[message]()


def test_allowed_inputs_compute_in_strict_mode():
    x, gamma = torch.randn(2, 4, **on, requires_grad=True), torch.ones(4, **on)
    mask = torch.ones(2048, 2048, dtype=torch.bool, **on).triu(1)
    query = torch.randn(1, 1, 4, 8, **on)
    with strict.enabled():
        torch_npu.npu_swiglu(torch_npu.npu_rms_norm(x, gamma)[0]).sum().backward()
        torch_npu.npu_swiglu(gamma)  # a row alone
        torch_npu.npu_fusion_attention(query, query, query, 1, "BNSD", atten_mask=mask, sparse_mode=2)
        torch_npu.npu_grouped_matmul(
            [x.detach()], [torch.ones(2, 4, 3, **on)], group_list=torch.tensor([1, 1], **on), group_list_type=1,
            group_type=0, split_item=2,
        )  # fmt: skip
    assert x.grad is not None and not strict.is_enabled()


def test_a_block_puts_back_the_mode_around_it():
    with strict.enabled():
        with strict.enabled(False):
            assert not strict.is_enabled()
        assert strict.is_enabled()
    assert not strict.is_enabled()


def test_a_reference_run_may_give_float32_alone_to_kernels_of_16_bits():
    x = torch.ones(2, 1, 1, 64, **on)
    with strict.enabled(reference_runs=True):
        torch_npu.npu_interleave_rope(x, x, x)
        tokens, experts = matrix(3, 4, dtype=torch.float32), matrix(2, 4, 5, dtype=torch.float32)
        training["npu_gmm"]([tokens], [experts], [], [2, 3], 0, 0)
        with pytest.raises(strict.ForbiddenInput, match="cos must be float16 or bfloat16"):
            torch_npu.npu_interleave_rope(x.bfloat16(), x, x)
        with pytest.raises(strict.ForbiddenInput, match="expert_ids must be int32"):
            dispatch(torch.float32, torch.int64, 8)
    with strict.enabled(), pytest.raises(strict.ForbiddenInput, match="x must be float16 or bfloat16"):
        torch_npu.npu_interleave_rope(x, x, x)


@pytest.mark.parametrize(("setting", "lets_float32_through"), [("1", False), ("float32", True)])
def test_the_environment_says_how_a_process_begins(monkeypatch, setting, lets_float32_through):
    program = (
        "import torch, torch_npu; from npu_emulator import strict; print(strict.is_enabled());"
        "x = torch.ones(2, 1, 1, 64, device='npu'); torch_npu.npu_interleave_rope(x, x, x)"
    )
    monkeypatch.setenv("NPU_EMULATOR_STRICT", setting)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout.split() == ["True"]
    assert (ended.returncode == 0) == lets_float32_through
    assert lets_float32_through or "ForbiddenInput: npu::npu_interleave_rope: x must be" in ended.stderr


def test_an_unknown_setting_is_named(monkeypatch):
    monkeypatch.setenv("NPU_EMULATOR_STRICT", "very")
    ended = subprocess.run([sys.executable, "-c", "import torch_npu"], capture_output=True, text=True)
    assert "NPU_EMULATOR_STRICT must be 0, 1 or float32, not 'very'" in ended.stderr


@pytest.mark.parametrize("name", strict.RULES)
def test_rules_speak_of_arguments_that_exist(name):
    parameters = inspect.signature(emulated()[name].function).parameters
    for rule in strict.RULES[name]:
        assert rule.argument in parameters


def matrix(*shape, dtype=torch.bfloat16):
    return torch.ones(shape, dtype=dtype, device="npu")


def experts(x=None, weight=None, bias=None, groups=("a", 2, "b", 2), shard=0, name="npu_bmm_reducescatter_alltoall"):
    given = matrix(2, 4, 6) if x is None else x, matrix(2, 6, 8) if weight is None else weight
    rest = (0, False, False) if name == "npu_alltoall_allgather_bmm" else ()
    return training[name](*given, bias, *groups, shard, *rest)


KERNELS_WITH_A_COLLECTIVE = {
    "all_gather_matmul: left must be float16 or bfloat16": lambda: training["all_gather_matmul"](
        matrix(2, 3, dtype=torch.float32), matrix(3, 4), None, matrix(4, 4), 0, 2, "0"
    ),
    "matmul_reduce_scatter: left must not be transposed": lambda: training["matmul_reduce_scatter"](
        matrix(3, 2).t(), matrix(3, 4), None, matrix(1, 4), 0, 2, "0"
    ),
    "matmul_all_reduce: bias must have 2 dimensions": lambda: training["matmul_all_reduce"](
        matrix(2, 3), matrix(3, 4), matrix(4), matrix(2, 4), 0, 2, "0"
    ),
    "npu_bmm_reducescatter_alltoall: weight must have the dtype of x": lambda: experts(
        weight=matrix(2, 6, 8, dtype=torch.float16)
    ),
    "bias must be float16 for float16 and float32 for bfloat16": lambda: experts(bias=matrix(2, 1, 8)),
    "group_tp must not be group_ep": lambda: experts(groups=("a", 2, "a", 2)),
    "npu_alltoall_allgather_bmm: group_tp_worldsize must be one of 2": lambda: experts(
        groups=("a", 2, "b", 3), name="npu_alltoall_allgather_bmm"
    ),
    "shard_type must be one of 0, 1": lambda: experts(shard=2),
    "x must have 3 dimensions": lambda: experts(x=matrix(4, 6)),
}


@pytest.mark.parametrize("rule", KERNELS_WITH_A_COLLECTIVE)
def test_kernels_with_a_collective_are_checked_before_they_look_for_their_group(rule):
    call = KERNELS_WITH_A_COLLECTIVE[rule]
    with strict.enabled(), pytest.raises(strict.ForbiddenInput, match=rule):
        call()
    with pytest.raises((RuntimeError, ValueError), match="group|communicator"):
        call()
