"""op-plugin's own tests of torch_npu 2.10.0.post4's operators: each file passes, or is listed here with the reason."""

from pathlib import Path

import pytest

from tests.stack_2026.upstream.reached import reached_operators
from tests.upstream import op_plugin

# The first test waits for all files, each a program of its own (90).
pytestmark = [pytest.mark.slow, pytest.mark.timeout(10800)]

_V4 = "aclnnFlashAttentionVarLenScoreV4 is not emulated"
# Files with a failing test, and the text of its failure.
CANNOT = {
    # If a sequence starts within a block, the kernel loads from the block's start, the emulator from the token.
    # vLLM-Ascend only passes starts of whole blocks.
    "test_atb_paged_cache_load": ("AssertionError: result error",),
    "test_mla_prolog_v3": ("ended with 1",),  # imports ml_dtypes, which the stack does not have
    "test_npu_add_rms_norm_dynamic_quant": ("aclnnAddRmsNormDynamicQuantV2 is not emulated",),
    "test_npu_dynamic_quant": ("aclnnRightShift is not emulated",),
    "test_npu_flash_attention": (_V4,),
    "test_npu_grouped_matmul_swiglu_quant": ("aclnnGroupedMatmulSwigluQuantWeightNZ is not emulated",),
    "test_npu_grouped_matmul_swiglu_quant_v2": ("aclnnGroupedMatmulSwigluQuantWeightNzV2 is not emulated",),
    "test_npu_moe_init_routing_v2": ("aclnnMoeInitRoutingV3 is not emulated",),  # with quantised activations
    # Weights of 4 bits, and an offset in the type of the result, which aclnnQuantMatmulV5's documents do not have.
    "test_npu_quant_matmul": ("groupSize 256 is not emulated", "Tensor yOffset not implemented for DT_"),
    "test_npu_quant_scatter": ("aclnnQuantize is not emulated",),
    "test_npu_quantize": ("aclnnQuantize is not emulated",),
}
# Files that may exceed the time limit: their ranks wait for one that failed or is slow, and one file compares
# gigabytes. Some finish on an idle machine.
MAY_NOT_END = {
    "test_all_gather_base_mm", "test_atb_linear", "test_atb_reshape_and_cache", "test_mm_all_reduce_base",
    "test_mm_all_reduce_base_add", "test_mm_reduce_scatter_base", "test_moe_distribute_combineA2",
    "test_moe_distribute_dispatchA2", "test_npu_grouped_matmul", "test_npu_moe_token_permute_and_unpermute",
    "test_weight_quant_mm_all_reduce_base", "test_weight_quant_mm_all_reduce_base_with_add",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(upstream: Path, tmp_path_factory) -> dict[str, op_plugin.Outcome]:
    """Outcomes by name of the files that call an operator reached by the stack."""
    every = op_plugin.files(upstream, checkout=op_plugin.CHECKOUT_2026)
    assert every, f"{upstream} lacks {op_plugin.CHECKOUT_2026}"
    reached = reached_operators(upstream, tmp_path_factory.mktemp("sources"))
    names = [path.name for path in every if op_plugin.calls_reached(path, reached)]
    found = op_plugin.run(upstream, names, checkout=op_plugin.CHECKOUT_2026)
    return {Path(outcome.file).stem: outcome for outcome in found}


def test_every_file_passes_but_those_that_cannot(outcomes):
    passed, ran = op_plugin.share(outcomes.values())
    print(f"{passed} of {ran} tests that ran passed, in {len(outcomes)} files")
    failed = {name: outcome.failed for name, outcome in outcomes.items() if outcome.state == "failed"}
    wrong = (set(failed) - MAY_NOT_END) ^ set(CANNOT)
    assert not wrong, {name: failed.get(name, "listed, and passes") for name in wrong}


def test_failures_say_what_is_listed(outcomes):
    for name, words in CANNOT.items():
        for reason in outcomes[name].failed.values():
            assert any(each in reason for each in words), (name, reason)


def test_most_files_test_something(outcomes):
    assert sum(outcome.passed > 0 for outcome in outcomes.values()) >= 20
