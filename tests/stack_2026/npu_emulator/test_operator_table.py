"""Every emulated operator's parameters against the calls of torch_npu 2.10.0.post4, vLLM-Ascend 0.23 and MindSpeed."""

from tests.npu_emulator.test_operator_table import differences, read_calls, read_written

# The operators that the pins of 2025 call must be written for every release.
CALLS = ("op_plugin_calls.txt", "op_plugin_calls_2.10.txt", "vllm_ascend_calls.txt", "mindspeed_calls.txt")


def test_written_operators_have_the_parameters_of_their_calls(tmp_path):
    written, calls = read_written(tmp_path / "results.json"), read_calls(*CALLS)
    assert len(written) > 580 and "aclnnAttentionUpdate" in written, "which the pins of 2025 do not call"
    assert differences(written, calls) == []
    assert differences(written | {"aclnnAddRmsNormBias": ["Tensor", "Tensor"]}, calls)
