"""Strict mode rejects sizes, values and combinations of parameters that documents forbid; otherwise it computes.

Demands on types and dimensions of single parameters are generated, and `test_documented_rules` checks them. Each
operator has a legal call here, whose parameters are the changes that a test may make.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch_npu

from tests.npu_emulator.device_process import DeviceProcess
from tests.npu_emulator.operators.compare import refused

HALF, OTHER_HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
NO_GROUP = "no communicator nobody in this process"
OPERATORS: dict[str, Callable[..., object]] = {}


def operator(function: Callable[..., object]) -> Callable[..., object]:
    OPERATORS[function.__name__] = function
    return function


def ones(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


@operator
def rms_norm(gamma=HALF):
    torch_npu.npu_rms_norm(ones(2, 4), ones(4, dtype=gamma))


@operator
def add_rms_norm(other=HALF, rows=2, gamma=HALF):
    torch_npu.npu_add_rms_norm(ones(2, 4), ones(rows, 4, dtype=other), ones(4, dtype=gamma))


@operator
def swiglu_gradient(gradient=HALF):
    torch_npu.npu_swiglu_backward(ones(2, 2, dtype=gradient), ones(2, 4))


@operator
def interleave_rope(size=64, dtype=HALF, table=HALF):
    torch_npu.npu_interleave_rope(ones(2, 1, 1, size, dtype=dtype), *[ones(2, 1, 1, size, dtype=table)] * 2)


@operator
def latent_cache(mode="PA", size=576, latent=512, place=3, dtype=HALF, gamma=HALF):
    kv, table = ones(1, 1, 1, size, dtype=dtype), ones(1, 1, 1, size - latent, dtype=dtype)
    caches = [ones(2, 16, 1, width, dtype=dtype) for width in (size - latent, latent)]
    index = torch.tensor([place], device="npu")
    torch_npu.npu_kv_rmsnorm_rope_cache(
        kv, ones(latent, dtype=gamma), table, table, index, *caches, cache_mode=mode
    )  # fmt: skip


@operator
def gating(experts=8, kept=1, groups=1, k=2, select=0, renorm=0, norm=0):
    torch_npu.npu_moe_gating_top_k(
        ones(2, experts), k, k_group=kept, group_count=groups, group_select_mode=select, renorm=renorm, norm_type=norm
    )


@operator
def finalize_routing(scales=HALF):
    rows, order = ones(2, 3), torch.tensor([0, 1], dtype=torch.int32, device="npu")
    torch_npu.npu_moe_finalize_routing(rows, None, None, None, ones(1, 2, dtype=scales), order, order.view(1, 2))


@operator
def grouped_product(weight=HALF):
    groups = torch.tensor([4], device="npu")
    torch_npu.npu_grouped_matmul(
        [ones(4, 3)], [ones(1, 3, 2, dtype=weight)], group_list=groups, group_type=0, split_item=3
    )


@operator
def added_products(rows=3, end=3):
    total, groups = ones(2, 2, dtype=FLOAT), torch.tensor([end], device="npu")
    torch_npu.npu_grouped_matmul_add_(total, ones(rows, 2), ones(rows, 2), groups)


def mask_of(side: int, diagonal: int = 1) -> torch.Tensor | None:
    return torch.ones(side, side, dtype=torch.bool, device="npu").triu(diagonal) if side else None


@operator
def attention(key=HALF, side=2048, diagonal=1):
    query, keys = ones(1, 1, 4, 8), ones(1, 1, 4, 8, dtype=key)
    torch_npu.npu_fusion_attention(query, keys, query, 1, "BNSD", atten_mask=mask_of(side, diagonal), sparse_mode=2)


@operator
def attention_gradient(gradient=HALF, side=2048, diagonal=1):
    query = ones(1, 1, 4, 8)
    output, largest, total, *_ = torch_npu.npu_fusion_attention(query, query, query, 1, "BNSD")
    torch_npu.npu_fusion_attention_grad(
        query, query, query, query.to(gradient), 1, "BNSD", atten_mask=mask_of(side, diagonal), sparse_mode=3,
        softmax_max=largest, softmax_sum=total, attention_in=output,
    )  # fmt: skip


@operator
def one_mask_changed_in_place(inverted=False):
    """The mask has been accepted before, at the same address."""
    query, mask = ones(1, 1, 4, 8), mask_of(2048)
    for round_ in range(2):
        torch_npu.npu_fusion_attention(query, query, query, 1, "BNSD", atten_mask=mask, sparse_mode=3)
        if inverted and not round_:
            mask.logical_not_()


@operator
def windowed_attention(before=65536, diagonal=1):
    """MindSpeed passes these windows with a causal mask."""
    query, mask = ones(1, 1, 4, 8), mask_of(4, diagonal)
    torch_npu.npu_fusion_attention(
        query, query, query, 1, "BNSD", atten_mask=mask, pre_tockens=before, next_tockens=0
    )  # fmt: skip


@operator
def windowed_gradient(before=65536, diagonal=1):
    query, mask = ones(1, 1, 4, 8), mask_of(4, diagonal)
    output, largest, total, *_ = torch_npu.npu_fusion_attention(query, query, query, 1, "BNSD")
    torch_npu.npu_fusion_attention_grad(
        query, query, query, query, 1, "BNSD", atten_mask=mask, pre_tockens=before, next_tockens=0,
        softmax_max=largest, softmax_sum=total, attention_in=output,
    )  # fmt: skip


def packed(ends, key_ends, mode=3) -> dict[str, object]:
    side = 2048 if mode else 4
    return {"atten_mask": mask_of(side), "sparse_mode": mode, "actual_seq_qlen": ends, "actual_seq_kvlen": key_ends}


@operator
def packed_attention(ends=(2, 4), key_ends=(2, 4), mode=3, before=65536):
    query = ones(4, 1, 8)
    torch_npu.npu_fusion_attention(
        query, query, query, 1, "TND", **packed(ends, key_ends, mode), pre_tockens=before, next_tockens=0
    )  # fmt: skip


@operator
def packed_gradient(ends=(2, 4), key_ends=(2, 4)):
    query = ones(4, 1, 8)
    output, largest, total, *_ = torch_npu.npu_fusion_attention(
        query, query, query, 1, "TND", **packed((2, 4), (2, 4))
    )  # fmt: skip
    torch_npu.npu_fusion_attention_grad(
        query, query, query, query, 1, "TND", softmax_max=largest, softmax_sum=total, attention_in=output,
        **packed(ends, key_ends),
    )  # fmt: skip


@operator
def infer_attention(key=HALF, side=2048, size=512, rope=64, has_key_rope=True, diagonal=1):
    query, keys = ones(1, 1, 4, size), ones(1, 1, 4, size, dtype=key)
    ropes = ones(1, 1, 4, rope)
    torch_npu.npu_fused_infer_attention_score(
        query, keys, keys, input_layout="BNSD", atten_mask=mask_of(side, diagonal), sparse_mode=3, query_rope=ropes,
        key_rope=ropes if has_key_rope else None,
    )  # fmt: skip


@operator
def one_query_each(rows=2):
    keys, mask = ones(2, 1, 4, 16), torch.zeros(rows, 4, dtype=torch.bool, device="npu")
    torch_npu.npu_fused_infer_attention_score(
        ones(2, 1, 1, 16), keys, keys, input_layout="BNSD", atten_mask=mask, sparse_mode=3
    )  # fmt: skip


@operator
def attention_from_pages(block_size=16, lengths=(4,)):
    pages = ones(2, block_size, 8)
    torch_npu.npu_incre_flash_attention(
        ones(1, 1, 8), pages, pages, block_table=torch.zeros(1, 1, dtype=torch.int32, device="npu"),
        block_size=block_size, actual_seq_lengths=lengths,
    )  # fmt: skip


@operator
def prompt_attention(key=HALF, side=2048):
    query, keys = ones(1, 2, 8), ones(1, 2, 8, dtype=key)
    torch_npu.npu_prompt_flash_attention(query, keys, keys, atten_mask=mask_of(side), sparse_mode=2)


@operator
def store_in_cache(key=HALF, slots=torch.int32):
    states, cache = ones(1, 1, 4, dtype=key), ones(1, 2, 1, 4, dtype=key)
    torch_npu._npu_reshape_and_cache(states, states, cache, cache, torch.tensor([0], dtype=slots, device="npu"))


@operator
def paged_attention(query=HALF, table=torch.int32, lengths=torch.int32):
    states, cache = ones(1, 1, 16, dtype=query), ones(2, 128, 1, 16, dtype=query)
    blocks = torch.zeros(1, 1, dtype=table, device="npu")
    torch_npu._npu_paged_attention(
        states, cache, cache, 1, 1, 1.0, blocks, torch.tensor([3], dtype=lengths), torch.empty_like(states)
    )


@operator
def flash_attention(query=HALF, lengths=torch.int32):
    states = ones(3, 1, 16, dtype=query)
    mask, tokens = ones(3, 3, dtype=query).triu(1), torch.tensor([3], dtype=lengths)
    torch_npu._npu_flash_attention(states, states, states, mask, tokens, 1.0, 1, 1, torch.empty_like(states))


@operator
def latent_attention(query=HALF, table=torch.int32):
    parts, caches = [ones(1, 1, s, dtype=query) for s in (8, 4)], [ones(2, 4, 1, s, dtype=query) for s in (8, 4)]
    blocks = torch.zeros(1, 1, dtype=table, device="npu")
    torch_npu.atb.npu_multi_head_latent_attention(*parts, *caches, blocks, [3], 1, 1.0, 1)


@operator
def ring_attention(query=HALF, lengths=torch.int32):
    latent, rope = ones(3, 1, 8, dtype=query), ones(3, 1, 4, dtype=query)
    torch_npu.atb.npu_ring_mla(
        q_nope=latent, q_rope=rope, k_nope=latent, k_rope=rope, value=latent, mask=ones(512, 512, dtype=query),
        seqlen=torch.tensor([3], dtype=lengths), head_num=1, kv_head_num=1, calc_type="calc_type_first_ring",
        mask_type="mask_type_triu", kernel_type="kernel_type_high_precision", input_layout="type_bsnd",
    )  # fmt: skip


@operator
def dispatch(rows=2, choices=1, width=4):
    chosen = torch.zeros(rows, choices, dtype=torch.int32, device="npu")
    torch_npu.npu_moe_distribute_dispatch(ones(rows, width), chosen, "nobody", 2, 0, 16)


def factors(width: int, weight: torch.dtype, is_turned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return ones(width, 4).t() if is_turned else ones(4, width), ones(width, 8, dtype=weight)


@operator
def gathered_product(width=256, weight=HALF, is_turned=False, turns=0, has_bias=False):
    bias = ones(8) if has_bias else None
    given = factors(width, weight, is_turned)
    torch_npu.npu_all_gather_base_mm(*given, "nobody", 2, bias=bias, comm_turn=turns)


@operator
def scattered_product(width=256, weight=HALF, is_turned=False, turns=0, has_bias=False):
    bias = ones(8) if has_bias else None
    given = factors(width, weight, is_turned)
    torch_npu.npu_mm_reduce_scatter_base(*given, "nobody", 2, bias=bias, comm_turn=turns)


@operator
def summed_product(width=256, weight=HALF, turns=0):
    torch_npu.npu_mm_all_reduce_base(*factors(width, weight, False), "nobody", comm_turn=turns)


# Arguments of an operator that its document forbids, and the words of the rejection.
FORBIDDEN: list[tuple[str, dict[str, object], str]] = [
    ("rms_norm", {"gamma": OTHER_HALF}, "aclnnRmsNorm: .* gamma must have the dtype of x or be float32"),
    ("add_rms_norm", {"other": FLOAT}, "aclnnAddRmsNorm: .* same dtype, but found x2 DT_FLOAT and x1 DT_BFLOAT16"),
    ("add_rms_norm", {"gamma": FLOAT}, "same dtype, but found gamma DT_FLOAT and x1 DT_BFLOAT16"),
    ("add_rms_norm", {"rows": 1}, "Expected tensor for x2 to have same size as tensor for x1"),
    ("swiglu_gradient", {"gradient": FLOAT}, "aclnnSwiGluGrad: .* Tensor yGrad must have the dtype of x"),
    ("interleave_rope", {"size": 4}, "aclnnInterleaveRope: .* Tensor x must have 64 elements"),
    ("interleave_rope", {"table": FLOAT}, "same dtype, but found cos DT_FLOAT and x DT_BFLOAT16"),
    ("latent_cache", {"size": 48, "latent": 32}, "aclnnKvRmsNormRopeCache: .* Tensor kv must have 576 elements"),
    ("latent_cache", {"latent": 560}, "Tensor gamma must have 512 elements"),
    ("latent_cache", {"gamma": OTHER_HALF}, "same dtype, but found gamma DT_FLOAT16 and kv DT_BFLOAT16"),
    ("latent_cache", {"mode": "PA_BLK_NZ"}, "Tensor index must name beginnings of blocks"),
    ("gating", {"kept": 2}, "aclnnMoeGatingTopK: .* kGroup must be at most groupCount"),
    ("gating", {"experts": 4096}, "Tensor x must have at most 2048 experts"),
    ("gating", {"k": 0}, "k must be 1 to 8, the experts of kGroup groups, but got 0"),
    ("gating", {"groups": 2, "k": 5}, "k must be 1 to 4, the experts of kGroup groups, but got 5"),
    ("gating", {"select": 2}, "groupSelectMode must be 0 or 1, but got 2"),
    ("gating", {"renorm": 7}, "renorm must be 0 or 1, but got 7"),
    ("gating", {"norm": 3}, "normType must be 0, 1 or 2, but got 3"),
    ("finalize_routing", {"scales": FLOAT}, "aclnnMoeFinalizeRoutingV2: .* Tensor scales must have the dtype"),
    ("grouped_product", {"weight": FLOAT}, "aclnnGroupedMatmul.*: .* Tensor weight must have the dtype of x"),
    ("added_products", {"end": 2}, "aclnnGroupedMatmulAdd: .* Tensor groupList must add up to the rows of x"),
    ("added_products", {"rows": 0, "end": 0}, "Tensor x must not be empty"),
    ("attention", {"side": 4}, r"aclnnFlashAttentionScore: .* Tensor attenMask must be \[2048, 2048\]"),
    ("attention", {"side": 0}, "sparseMode 1 to 4 needs attenMask"),
    ("attention", {"key": OTHER_HALF}, "Tensor key must have the dtype of query"),
    ("attention", {"diagonal": 0}, r"Tensor attenMask must be ones\(2048, 2048\).triu\(1\)"),
    ("attention", {"diagonal": 2048}, r"Tensor attenMask must be ones\(2048, 2048\).triu\(1\)"),
    ("attention_gradient", {"diagonal": 0}, r"Tensor attenMask must be ones\(2048, 2048\).triu\(1\)"),
    ("infer_attention", {"diagonal": 0}, r"Tensor attenMask must be ones\(2048, 2048\).triu\(1\)"),
    ("one_mask_changed_in_place", {"inverted": True}, r"Tensor attenMask must be ones\(2048, 2048\).triu\(1\)"),
    ("windowed_attention", {"before": 1}, "must hide all keys outside of preTokens 1 and nextTokens 0"),
    ("windowed_attention", {"diagonal": 2}, "must hide all keys outside of preTokens 65536 and nextTokens 0"),
    ("windowed_gradient", {"before": 1}, "must hide all keys outside of preTokens 1 and nextTokens 0"),
    ("packed_attention", {"mode": 0, "before": 0}, "must hide all keys outside of preTokens 0 and nextTokens 0"),
    ("packed_attention", {"ends": (2, 3)}, "actualSeqQLen must be .* end with the 4 tokens of the batch, but got 3"),
    ("packed_attention", {"key_ends": (2, 3)}, "actualSeqKvLen must be .* the 4 tokens of the batch, but got 3"),
    ("packed_attention", {"key_ends": (1, 4)}, "actualSeqQLen must be at most the 1 keys of each sequence .* got 2"),
    ("packed_gradient", {"ends": (2, 3)}, "actualSeqQLen must be .* end with the 4 tokens of the batch, but got 3"),
    ("packed_gradient", {"key_ends": (1, 4)}, "actualSeqQLen must be at most the 1 keys of each sequence .* got 2"),
    ("one_query_each", {"rows": 3}, "Rows of Tensor attenMask must be the 2 sequences .* but got 3"),
    ("attention_gradient", {"side": 0}, "aclnnFlashAttentionScoreGrad: .* sparseMode 1 to 4 needs attenMask"),
    ("attention_gradient", {"gradient": FLOAT}, "Tensor dy must have the dtype of query"),
    ("infer_attention", {"side": 4}, r"aclnnFusedInferAttentionScoreV3: .* attenMask must be \[2048, 2048\]"),
    ("infer_attention", {"side": 0}, "sparseMode 1 to 4 needs attenMask"),
    ("infer_attention", {"key": OTHER_HALF}, "Tensor key must have the dtype of query"),
    ("infer_attention", {"has_key_rope": False}, "Tensor queryRope needs keyRope"),
    ("infer_attention", {"rope": 16}, "Tensor queryRope must have 64 elements"),
    ("infer_attention", {"size": 32}, "Tensor query must have 512 or 128 elements"),
    ("attention_from_pages", {"block_size": 8}, "aclnnIncreFlash.*: .* blockSize must be a multiple of 16 up to 512"),
    ("attention_from_pages", {"block_size": 1024}, "blockSize must be a multiple of 16 up to 512"),
    ("attention_from_pages", {"lengths": None}, "Tensor blockTable needs the lengths of the keys"),
    ("prompt_attention", {"key": OTHER_HALF}, "aclnnPromptFlash.*: .* Tensor key must have the dtype of query"),
    ("prompt_attention", {"side": 0}, "sparseMode 1 to 4 needs attenMask"),
    ("store_in_cache", {"key": FLOAT}, "ReshapeAndCacheOperation: .* Tensor key must be float16 or bfloat16"),
    ("store_in_cache", {"slots": torch.int64}, "Tensor slotMapping must be int32"),
    ("paged_attention", {"query": FLOAT}, "PagedAttentionOperation: .* Tensor query must be float16 or bfloat16"),
    ("paged_attention", {"table": torch.int64}, "Tensor blockTables must be int32"),
    ("paged_attention", {"lengths": torch.int64}, "Tensor contextLens must be int32"),
    ("flash_attention", {"query": FLOAT}, "SelfAttentionOperation: .* Tensor query must be float16 or bfloat16"),
    ("flash_attention", {"lengths": torch.int64}, "Tensor seqLen must be int32"),
    ("latent_attention", {"query": FLOAT}, "AtbMLA: .* Tensor qNope must be float16 or bfloat16"),
    ("latent_attention", {"table": torch.int64}, "Tensor blockTables must be int32"),
    ("ring_attention", {"query": FLOAT}, "AtbRingMLA: .* Tensor qNope must be float16 or bfloat16"),
    ("ring_attention", {"lengths": torch.int64}, "Tensor seqLen must be int32"),
    ("dispatch", {"choices": 9}, "aclnnMoeDistributeDispatch: .* Tensor expertIds must have at most 8 columns"),
    ("dispatch", {"rows": 600}, "Tensor expertIds must have at most 512 rows"),
    ("dispatch", {"width": 8192}, "Tensor x must have at most 7168 columns"),
    *(
        (product, *rest)
        for product in ("gathered_product", "scattered_product", "summed_product")
        for rest in (
            ({"width": 128}, "Tensor x1 must have 256 to 65534 columns"),
            (
                {"weight": OTHER_HALF},
                "x2 must have the dtype of x1|same dtype, but found x1 DT_BFLOAT16 and x2 DT_FLOAT16",
            ),
            ({"turns": 1}, "commTurn must be 0"),
            ({"is_turned": True}, "Tensor x1 must not be transposed"),
            ({"has_bias": True}, "Tensor bias must be zero"),
        )
        if product != "summed_product" or not {"is_turned", "has_bias"} & rest[0].keys()
    ),
]


def outcome(_: dict, name: str, changes: dict[str, object]) -> str:
    """Call an operator with `changes` to legal arguments and return the errors; empty if it computes.

    Errors of ATB's kernels appear when the device is synchronized.
    """
    said = []
    for step in (lambda: OPERATORS[name](**changes), torch.npu.synchronize):
        try:
            step()
        except RuntimeError as error:
            said.append(str(error))
    return "\n".join(said)


@pytest.fixture(scope="module", params=["1", "0", "float32"])
def mode(request) -> Iterator[tuple[str, DeviceProcess]]:
    chip = "Ascend910B3"  # which has all of these operators
    with DeviceProcess(TASK_QUEUE_ENABLE="0", NPU_EMULATOR_STRICT=request.param, NPU_EMULATOR_CHIP=chip) as process:
        yield request.param, process


def test_what_is_legal_computes_in_every_mode(mode):
    for name in OPERATORS:
        said = mode[1](outcome, name, {})
        assert not said or NO_GROUP in said, f"{name}: {said}"


def test_documented_limits_enforced_only_in_strict_mode(mode):
    """Reference runs may give float32, and no other type, to kernels of 16 bits."""
    setting, process = mode
    for name, changes, words in FORBIDDEN:
        said = process(outcome, name, changes)
        if setting == "0" or (setting == "float32" and "must be float16" in words):
            assert "EZ1001" not in said, f"{name} {changes}: {said}"
        else:
            assert "EZ1001" in said and re.search(words, said), f"{name} {changes}: {said or 'computes'}"


def test_reference_runs_go_by_the_types_of_a_whole_call(mode):
    """The types of this kernel are in the generated table."""
    setting, process = mode
    said = process(outcome, "latent_cache", {"dtype": FLOAT, "gamma": FLOAT})
    assert ("Tensor kv not implemented for DT_FLOAT" in said) == (setting == "1") and (setting == "1" or not said)
    mixed = process(outcome, "latent_cache", {"dtype": FLOAT})
    assert ("Tensor kv not implemented for DT_FLOAT" in mixed) == (setting != "0")


def test_strict_mode_is_asked_for_at_every_call(monkeypatch):
    """The operator has been called before, in a process that tests of several modes share."""
    numbers = [torch.ones(2, dtype=torch.int64, device="npu")]
    for strict in ("0", "1", "0"):
        monkeypatch.setenv("NPU_EMULATOR_STRICT", strict)
        with refused("not implemented for DT_INT64") if strict == "1" else nullcontext():
            torch._foreach_add(numbers, 1)
