"""What the emulated CANN of this process has done on streams, by CANN's names; for programs on the engine cann."""

import ctypes

import npu_emulator_engine

# By the names that the first engine counts under.
OPERATORS = {
    "npu::npu_fused_infer_attention_score": "aclnnFusedInferAttentionScore",
    "atb::npu_multi_head_latent_attention": "AtbMLA",
    "atb::npu_paged_cache_load": "AtbPagedCacheLoad",
    "atb::_npu_paged_attention_splitfuse": "PagedAttentionSplitfuse",
}


def begin() -> None:
    """Count from now on."""
    npu_emulator_engine.library().npu_emulator_cann_count_calls()


def calls() -> dict[str, int]:
    """How often each thing was done since then. What a captured graph holds counts when it is replayed."""
    function = npu_emulator_engine.library().npu_emulator_cann_calls
    function.restype = ctypes.c_char_p
    lines = (line.split(" ", 1) for line in function().decode().splitlines())
    return {name: int(number) for number, name in lines}


def of_operators(counted: dict[str, int]) -> dict[str, int]:
    """Calls by the first engine's names; of every version that CANN's operator has, and only what was called."""
    sums = {
        ours: sum(number for name, number in counted.items() if name.startswith(theirs))
        for ours, theirs in OPERATORS.items()
    }
    return {name: number for name, number in sums.items() if number}
