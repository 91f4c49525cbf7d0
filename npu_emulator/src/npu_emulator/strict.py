"""Refuses what the documentation of an operator forbids, although it would compute here.

    with strict.enabled():
        torch_npu.npu_swiglu(x)

With NPU_EMULATOR_STRICT=1 in the environment a process begins in this mode. NPU_EMULATOR_STRICT=float32 is for
reference runs: where a kernel takes 16 bits only, a call whose floating-point tensors all are float32 is let through.

Rules are taken from the operator pages of torch_npu 2.5.1 for Atlas A2 and A3. For the ``_npu_*`` and ``atb``
operators, which have no such pages, they are the types that vllm-ascend 0.9.1 passes. Those of ``npu_extension``, the
kernels that training code binds itself, are from the pages of the CANN or ATB kernel behind them. Operators without an
entry in `RULES` are not checked.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _C

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)


class ForbiddenInput(RuntimeError):
    """An input that the documentation of the operator does not allow."""


@dataclass(frozen=True)
class Rule:
    """Something that must hold of the arguments, by name, whenever `argument` is given.

    of_values: it looks at elements, which are not there yet while a graph is captured.
    sixteen_bits: it allows no floating-point type but those of 16 bits.
    """

    argument: str
    text: str
    holds: Callable[[dict], bool]
    of_values: bool = False
    sixteen_bits: bool = False


def _dtype(argument: str, *allowed: torch.dtype) -> Rule:
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    sixteen_bits = bool(set(allowed) & set(HALVES)) and torch.float32 not in allowed
    return Rule(argument, f"must be {names}", lambda given: given[argument].dtype in allowed, sixteen_bits=sixteen_bits)


def _same_dtype(argument: str, other: str) -> Rule:
    return Rule(argument, f"must have the dtype of {other}", lambda given: given[argument].dtype == given[other].dtype)


def _dims(argument: str, least: int, most: int) -> Rule:
    text = f"must have {least} dimensions" if least == most else f"must have {least} to {most} dimensions"
    return Rule(argument, text, lambda given: least <= given[argument].dim() <= most)


def _one_of(argument: str, *allowed) -> Rule:
    return Rule(argument, f"must be one of {', '.join(map(str, allowed))}", lambda given: given[argument] in allowed)


def _compressed_mask(given: dict) -> bool:
    return given["sparse_mode"] not in (2, 3, 4) or tuple(given["atten_mask"].shape[-2:]) == (2048, 2048)


def _mask_where_needed(given: dict) -> bool:
    return given["sparse_mode"] not in (1, 2, 3, 4) or given["atten_mask"] is not None


def _half_of_x(given: dict) -> bool:
    half = list(given["x"].shape)
    half[given["dim"]] //= 2
    return list(given["gradient"].shape) == half


def _shape_of(argument: str, other: str) -> Rule:
    return Rule(argument, f"must have the shape of {other}", lambda given: given[argument].shape == given[other].shape)


def _contiguous(argument: str, text: str = "must be contiguous") -> Rule:
    return Rule(argument, text, lambda given: given[argument].is_contiguous())


def _blocks_begin(given: dict) -> bool:
    return "_BLK_" not in given["cache_mode"] or not bool((given["index"] % given["k_cache"].shape[1]).any())


def _both(argument: str, other: str) -> Rule:
    return Rule(argument, f"needs {other}", lambda given: given[other] is not None)


_MASKED = [
    _dtype("atten_mask", torch.bool, torch.uint8),
    Rule("atten_mask", "must be [2048, 2048] with sparse_mode 2, 3 and 4", _compressed_mask),
    Rule("sparse_mode", "1 to 4 needs atten_mask", _mask_where_needed),
]
_ATTENTION_GRADIENT = [
    *(_dtype(name, *FLOATS) for name in ("query", "key", "value")),
    *(_same_dtype(name, "query") for name in ("key", "value", "dy", "attention_in")),
    *(_dtype(name, torch.float32) for name in ("softmax_max", "softmax_sum")),
]
_INFERENCE_ATTENTION = [
    *(_dtype(name, *HALVES) for name in ("query", "key", "value")),
    *(_same_dtype(name, "query") for name in ("key", "value")),
    *map(_contiguous, ("query", "key", "value")),
    _one_of("input_layout", "BSH", "BSND", "BNSD"),
]
_BLOCKS_OF_16 = Rule(
    "block_size",
    "must be a multiple of 16 up to 512",
    lambda given: given["block_size"] % 16 == 0 and given["block_size"] <= 512,
)


def _joined(left: str, leasts: tuple[int, int] = (2, 2)) -> list[Rule]:
    """Rules of the pages of products with a collective inside, for inputs without quantisation."""
    return [
        _dtype(left, *HALVES),
        _dims(left, *leasts),
        _dims("x2", 2, 2),
        _same_dtype("x2", left),
        _contiguous(left, "must not be transposed"),
        Rule(left, "must have 256 to 65534 columns", lambda given: 256 <= given[left].shape[-1] < 65535),
        Rule(
            "x2", "must have as many rows as the left matrix has columns", lambda given: _fits(given[left], given["x2"])
        ),
        _one_of("comm_turn", 0),
    ]


def _fits(left: Tensor, right: Tensor) -> bool:
    return left.shape[-1] == right.shape[0]


_RANKS = _one_of("world_size", 2, 4, 8, 16, 32)
_NO_BIAS = Rule("bias", "must be zero, if there is one", lambda given: not bool(given["bias"].any()), of_values=True)

_LCOC = [
    *(_dtype(name, *HALVES) for name in ("left", "right", "output")),
    *(_dims(name, 2, 2) for name in ("left", "right", "output", "bias")),
    _contiguous("left", "must not be transposed"),
]
_BATCHED = [
    _dtype("x", *HALVES),
    _same_dtype("weight", "x"),
    *(_dims(name, 3, 3) for name in ("x", "weight")),
    Rule(
        "bias",
        "must be float16 for float16 and float32 for bfloat16",
        lambda given: given["bias"].dtype == (torch.float16 if given["x"].dtype == torch.float16 else torch.float32),
    ),
    *(_one_of(name, 2, 4, 8, 16, 32) for name in ("group_ep_worldsize", "group_tp_worldsize")),
    Rule("group_tp", "must not be group_ep", lambda given: given["group_tp"] != given["group_ep"]),
    _one_of("shard_type", 0, 1),
    Rule("weight", "must have at most 32 experts", lambda given: given["weight"].shape[0] <= 32),
]
_EXCHANGED = [
    _dims("expert_ids", 2, 2),
    _dtype("expert_ids", torch.int32),
    Rule("expert_ids", "must have at most 8 columns", lambda given: given["expert_ids"].shape[1] <= 8),
    Rule("expert_ids", "must have at most 512 rows", lambda given: given["expert_ids"].shape[0] <= 512),
    Rule(
        "moe_expert_num",
        "must be a multiple of ep_world_size",
        lambda given: given["moe_expert_num"] % given["ep_world_size"] == 0,
    ),
]
_DISPATCHED = [
    _dims("x", 2, 2),
    _dtype("x", *HALVES),
    Rule("x", "must have at most 7168 columns", lambda given: given["x"].shape[1] <= 7168),
    *_EXCHANGED,
]
_COMBINED = [_dtype("expand_x", *HALVES), _dtype("expert_scales", torch.float32), *_EXCHANGED]


def _of_lists(argument: str, text: str, holds: Callable[[Tensor], bool]) -> Rule:
    """A rule for every tensor of a list."""
    return Rule(argument, text, lambda given: all(map(holds, given[argument])), sixteen_bits="16" in text)


def _rows_of_groups(groups: Tensor | list[int], group_list_type: int | None) -> int:
    """All rows of a list of groups in running totals, or in numbers where group_list_type is 1."""
    values = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    return sum(values) if group_list_type else values[-1]


def _adds_up(argument: str, rows: Callable[[dict], int]) -> Rule:
    def holds(given: dict) -> bool:
        return _rows_of_groups(given[argument], given.get("group_list_type")) == rows(given)

    return Rule(argument, "must add up to the rows of x", holds, of_values=True)


def _groups_fit(given: dict) -> bool:
    """MC2 leaves room behind the rows of the last group, and vllm-ascend multiplies it with them."""
    rows = given["x"][0].shape[1 if given["group_type"] == 2 else 0]
    return _rows_of_groups(given["group_list"], given["group_list_type"]) <= rows


RULES: dict[str, list[Rule]] = {
    "npu::npu_rms_norm": [
        _dtype("x", *FLOATS),
        _dims("x", 2, 8),
        Rule(
            "gamma",
            "must have the dtype of x or be float32",
            lambda given: given["gamma"].dtype in (given["x"].dtype, torch.float32),
        ),
    ],
    "npu::npu_add_rms_norm": [
        _dtype("x1", *FLOATS),
        _same_dtype("x2", "x1"),
        _same_dtype("gamma", "x1"),
        _shape_of("x2", "x1"),
    ],
    "npu::npu_swiglu": [
        _dtype("x", *FLOATS),
        _dims("x", 1, 8),
        Rule("x", "must have an even size in dim", lambda given: given["x"].shape[given["dim"]] % 2 == 0),
    ],
    "npu::npu_swiglu_backward": [
        _dtype("x", *FLOATS),
        _same_dtype("gradient", "x"),
        Rule("gradient", "must be half of x in dim", _half_of_x),
    ],
    "npu::npu_rotary_mul": [
        *(_dtype(name, *FLOATS) for name in ("x", "cos", "sin")),
        *(_dims(name, 4, 4) for name in ("x", "cos", "sin")),
    ],
    "npu::npu_moe_init_routing": [
        _dims("x", 2, 2),
        _dtype("x", *FLOATS),
        _dtype("row_idx", torch.int32),
        _dtype("expert_idx", torch.int32),
        _shape_of("row_idx", "expert_idx"),
    ],
    "npu::npu_moe_compute_expert_tokens": [_dims("sorted_experts", 1, 1), _dtype("sorted_experts", torch.int32)],
    "npu::npu_moe_finalize_routing": [
        _dims("expanded_permuted_rows", 2, 2),
        _dtype("expanded_permuted_rows", *FLOATS),
        *(_same_dtype(name, "expanded_permuted_rows") for name in ("skip1", "skip2", "bias", "scales")),
        _dtype("expanded_src_to_dst_row", torch.int32),
        _dtype("export_for_source_row", torch.int32),
    ],
    "npu::npu_moe_token_permute": [_dtype("tokens", torch.bfloat16), _dims("tokens", 2, 2)],
    "npu::npu_grouped_matmul": [
        _one_of("split_item", 0, 1, 2, 3),
        _dtype("group_list", torch.int64),
        Rule("group_list", "must have at most 1024 entries", lambda given: given["group_list"].numel() <= 1024),
        Rule("group_list", "must add up to the rows of x or fewer", _groups_fit, of_values=True),
    ],
    "npu::npu_grouped_matmul_add_": [
        *(_dtype(name, *HALVES) for name in ("x", "weight")),
        _same_dtype("weight", "x"),
        _dtype("total", torch.float32),
        *(_dims(name, 2, 2) for name in ("x", "weight", "total")),
        Rule("x", "must not be empty", lambda given: given["x"].numel() > 0),
        _contiguous("total"),
        _dtype("group_list", torch.int64),
        _adds_up("group_list", lambda given: given["x"].shape[0]),
    ],
    "npu::npu_fusion_attention": [
        *(_dtype(name, *FLOATS) for name in ("query", "key", "value")),
        _same_dtype("key", "query"),
        *_MASKED,
    ],
    "npu::npu_fusion_attention_grad": [*_ATTENTION_GRADIENT, *_MASKED],
    "npu_extension::npu_fusion_attention_v2": [
        *(_dtype(name, *HALVES) for name in ("query", "key", "value")),
        *(_same_dtype(name, "query") for name in ("key", "value")),
        *_MASKED,
        _one_of("pse_type", 0, 1, 2, 3),
    ],
    "npu_extension::npu_fusion_attention_grad_v2": [*_ATTENTION_GRADIENT, *_MASKED, _one_of("pse_type", 0, 1, 2, 3)],
    "npu::npu_prompt_flash_attention": [*_INFERENCE_ATTENTION, *_MASKED],
    "npu::npu_incre_flash_attention": [
        *_INFERENCE_ATTENTION,
        _dtype("block_table", torch.int32),
        _both("block_table", "actual_seq_lengths"),
        _BLOCKS_OF_16,
    ],
    "npu::npu_interleave_rope": [
        *(_dtype(name, *HALVES) for name in ("x", "cos", "sin")),
        *(_dims(name, 4, 4) for name in ("x", "cos", "sin")),
        Rule("x", "must have 64 elements in its last dimension", lambda given: given["x"].shape[-1] == 64),
    ],
    "npu::npu_kv_rmsnorm_rope_cache": [
        _dtype("kv", *HALVES),
        _dims("kv", 4, 4),
        *(_same_dtype(name, "kv") for name in ("gamma", "cos", "sin", "k_cache", "ckv_cache")),
        Rule("kv", "must have 576 elements in its last dimension", lambda given: given["kv"].shape[-1] == 576),
        Rule("gamma", "must have 512 elements", lambda given: given["gamma"].numel() == 512),
        _dtype("index", torch.int64),
        Rule("index", "must name beginnings of blocks with this cache_mode", _blocks_begin, of_values=True),
    ],
    "npu::npu_fused_infer_attention_score": [
        *(_dtype(name, *HALVES) for name in ("query", "key", "value")),
        *(_same_dtype(name, "query") for name in ("key", "value", "query_rope", "key_rope")),
        _both("query_rope", "key_rope"),
        _both("key_rope", "query_rope"),
        _both("block_table", "actual_seq_lengths_kv"),
        _dtype("block_table", torch.int32),
        _dtype("atten_mask", torch.bool, torch.int8, torch.uint8),
        Rule("atten_mask", "must be [2048, 2048] with sparse_mode 2, 3 and 4", _compressed_mask),
        Rule("sparse_mode", "1 to 4 needs atten_mask", _mask_where_needed),
        _BLOCKS_OF_16,
    ],
    "npu::npu_moe_gating_top_k": [
        _dims("x", 2, 2),
        _dtype("x", *FLOATS),
        _same_dtype("bias", "x"),
        Rule("k_group", "must be at most group_count", lambda given: given["k_group"] <= given["group_count"]),
        Rule("x", "must have at most 2048 experts", lambda given: given["x"].shape[1] <= 2048),
    ],
    "npu::npu_moe_distribute_dispatch": _DISPATCHED,
    "npu::npu_moe_distribute_dispatch_v2": _DISPATCHED,
    "npu::npu_moe_distribute_combine": _COMBINED,
    "npu::npu_moe_distribute_combine_v2": _COMBINED,
    "npu::npu_all_gather_base_mm": [*_joined("x"), _RANKS, _NO_BIAS, _one_of("gather_index", 0)],
    "npu::npu_mm_reduce_scatter_base": [
        *_joined("x"),
        _RANKS,
        _NO_BIAS,
        Rule("x", "must have rows for every rank", lambda given: given["x"].shape[0] % given["world_size"] == 0),
    ],
    "npu::npu_mm_all_reduce_base": [*_joined("x", (2, 3)), _dims("bias", 1, 1)],
    "npu_extension::matmul_all_reduce": _LCOC,
    "npu_extension::all_gather_matmul": _LCOC,
    "npu_extension::all_gather_matmul_v2": _LCOC,
    "npu_extension::matmul_reduce_scatter": _LCOC,
    "npu_extension::npu_alltoall_allgather_bmm": _BATCHED,
    "npu_extension::npu_bmm_reducescatter_alltoall": _BATCHED,
    "npu_extension::npu_gmm": [
        _of_lists("x", "must hold float16 or bfloat16 matrices", lambda x: x.dtype in HALVES and x.dim() == 2),
        Rule(
            "weight",
            "must have the dtype of x",
            lambda given: {each.dtype for each in given["weight"]} == {each.dtype for each in given["x"]},
        ),
        _one_of("group_type", -1, 0, 2),
        _adds_up("group_list", lambda given: given["x"][0].shape[1 if given["group_type"] == 2 else 0]),
    ],
    "npu_extension::npu_groupmatmul_add_fp32": [
        _dtype("x", *HALVES),
        _same_dtype("weight", "x"),
        _dtype("group_list", torch.int64),
        _adds_up("group_list", lambda given: given["x"].shape[0]),
        _dtype("grad", torch.float32),
    ],
    "npu_extension::npu_matmul_add_fp32": [
        *(_dims(name, 2, 2) for name in ("x", "weight")),
        _dtype("x", *HALVES),
        _same_dtype("weight", "x"),
        _dtype("total", torch.float32),
    ],
    "npu_extension::npu_apply_fused_adamw_v2": [
        *(_dtype(name, *FLOATS) for name in ("param", "grad", "exp_avg", "exp_avg_sq")),
        *(_same_dtype(name, "param") for name in ("exp_avg", "exp_avg_sq")),
        Rule("state_step", "must hold one number", lambda given: given["state_step"].numel() == 1),
    ],
    "npu_extension::npu_apply_fused_ema_adamw": [
        *(_dtype(name, torch.float32) for name in ("grad", "var", "m", "v", "s")),
        _dtype("step", torch.int64),
        *(_shape_of(name, "var") for name in ("grad", "m", "v", "s")),
        _one_of("mode", 0, 1),
    ],
    "npu_extension::npu_moe_token_permute": [
        _dtype("tokens", torch.bfloat16),
        _dims("tokens", 2, 2),
        _dims("indices", 1, 2),
        _one_of("padded_mode", False),
    ],
    "npu_extension::npu_moe_token_unpermute": [
        _dtype("permuted_tokens", torch.bfloat16),
        _dims("permuted_tokens", 2, 2),
        _dtype("sorted_indices", torch.int32),
        _dims("sorted_indices", 1, 1),
        _one_of("padded_mode", False),
    ],
    "npu_extension::npu_rotary_position_embedding": [
        *(_dtype(name, *FLOATS) for name in ("x", "cos", "sin")),
        *(_dims(name, 4, 4) for name in ("x", "cos", "sin")),
        _shape_of("sin", "cos"),
        _one_of("mode", 0, 1),
    ],
    "npu_extension::npu_ring_attention_update": [
        _same_dtype("cur_attn_out", "prev_attn_out"),
        *(
            _dtype(name, torch.float32)
            for name in (
                "prev_softmax_max",
                "prev_softmax_sum",
                "cur_softmax_max",
                "cur_softmax_sum",
            )
        ),
        _one_of("layout", "SBH", "TND"),
    ],
    "atb::_npu_reshape_and_cache": [
        _dtype("key", *HALVES, torch.int8),
        _same_dtype("key_cache", "key"),
        _dtype("slot_indices", torch.int32),
    ],
    "atb::_npu_paged_attention": [
        _dtype("query", *HALVES),
        _dtype("block_table", torch.int32),
        _dtype("context_lens", torch.int32),
    ],
    "atb::_npu_flash_attention": [_dtype("query", *HALVES), _dtype("seq_len", torch.int32)],
    "atb::npu_multi_head_latent_attention": [_dtype("q_nope", *HALVES), _dtype("block_tables", torch.int32)],
    "atb::npu_ring_mla": [_dtype("q_nope", *HALVES), _dtype("seqlen", torch.int32)],
}

_MODES = {"": (False, False), "0": (False, False), "1": (True, False), "float32": (True, True)}
_setting = os.environ.get("NPU_EMULATOR_STRICT", "")
if _setting not in _MODES:
    raise RuntimeError(f"NPU_EMULATOR_STRICT must be 0, 1 or float32, not {_setting!r}")
_enabled, _reference_runs = _MODES[_setting]


def is_enabled() -> bool:
    return _enabled


@contextlib.contextmanager
def enabled(on: bool = True, reference_runs: bool = False) -> Iterator[None]:
    """Check every operator of torch_npu that is called inside, in the whole process, or none if not `on`.

    reference_runs: let calls through whose floating-point tensors all are float32 where a kernel takes 16 bits only.
    """
    global _enabled, _reference_runs
    before, (_enabled, _reference_runs) = (_enabled, _reference_runs), (on, reference_runs)
    try:
        yield
    finally:
        _enabled, _reference_runs = before


@functools.cache
def _parameters(function: Callable) -> tuple[tuple[str, ...], dict, frozenset[str]]:
    """The names of its parameters in order, those with a default, and those without. Binding each call takes longer."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return tuple(p.name for p in parameters), defaults, frozenset(p.name for p in parameters) - defaults.keys()


def _is_reference(given: dict) -> bool:
    """Whether every floating-point tensor among the arguments, also in lists, is float32."""
    values = [item for value in given.values() for item in (value if isinstance(value, (list, tuple)) else [value])]
    return all(item.dtype == torch.float32 for item in values if isinstance(item, Tensor) and item.is_floating_point())


def check(name: str, function: Callable, args: tuple, kwargs: dict) -> None:
    """Raise ForbiddenInput naming the operator, the argument and the rule that it breaks."""
    rules = RULES.get(name)
    if not rules:
        return
    names, defaults, required = _parameters(function)
    given = defaults | dict(zip(names, args, strict=False)) | kwargs
    if not required <= given.keys():
        return  # the call itself says what is missing
    capturing = _C.is_recording()
    for rule in rules:
        value = given[rule.argument]
        if value is None or (rule.of_values and capturing) or rule.holds(given):
            continue
        if rule.sixteen_bits and _reference_runs and _is_reference(given):
            continue
        shown = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ForbiddenInput(f"{name}: {rule.argument} {rule.text}, not {shown}")


@functools.cache
def checked(name: str, function: Callable) -> Callable:
    """`function`, which takes host tensors, with a check before each call; its `__wrapped__` is the function itself."""

    @functools.wraps(function)
    def check_and_call(*args, **kwargs):
        check(name, function, args, kwargs)
        return function(*args, **kwargs)

    return check_and_call
