"""Operators by the names that the first engine counts them under, for programs that run on both."""

OPERATORS = {
    "npu::npu_fused_infer_attention_score": "aclnnFusedInferAttentionScore",
    "atb::npu_multi_head_latent_attention": "AtbMLA",
    "atb::npu_paged_cache_load": "AtbPagedCacheLoad",
    "atb::_npu_paged_attention_splitfuse": "PagedAttentionSplitfuse",
}


def of_operators(counted: dict[str, int]) -> dict[str, int]:
    """Calls by the first engine's names; of every version that CANN's operator has, and only what was called."""
    sums = {
        ours: sum(number for name, number in counted.items() if name.startswith(theirs))
        for ours, theirs in OPERATORS.items()
    }
    return {name: number for name, number in sums.items() if number}
