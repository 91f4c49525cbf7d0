"""Routers of the rollout compared with transformers' and training's, with biases as published for DeepSeek-V3."""

import pytest
import torch
import torch_npu  # noqa: F401
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

EXPERTS, HIDDEN, TOKENS, TOP_K = 256, 128, 400, 8


@pytest.fixture(scope="module")
def published() -> DeepseekV3TopkRouter:
    """Return transformers' router with bfloat16 weights, and float32 biases near 5 that differ by hundredths."""
    router = DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=HIDDEN, n_routed_experts=EXPERTS))
    drawn = torch.Generator().manual_seed(0)
    router.weight.data = (torch.randn(EXPERTS, HIDDEN, generator=drawn) * 0.03).bfloat16()
    router.e_score_correction_bias.copy_(5 + torch.randn(EXPERTS, generator=drawn) * 0.02)
    return router


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


def rollout_gate(published: DeepseekV3TopkRouter) -> torch.nn.Module:
    """Return a gate as vLLM-Ascend builds it: weight and bias in the model's dtype."""
    gate = torch.nn.Module()
    gate.weight = torch.nn.Parameter(torch.empty(EXPERTS, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
    gate.e_score_correction_bias = torch.nn.Parameter(torch.empty(EXPERTS, dtype=torch.bfloat16), requires_grad=False)
    return gate


def load(gate: torch.nn.Module, published: DeepseekV3TopkRouter) -> torch.nn.Module:
    gate.weight.data.copy_(published.weight)
    gate.e_score_correction_bias.data.copy_(published.e_score_correction_bias)
    return gate.npu()


def kernels_choice(scores: torch.Tensor, bias: torch.Tensor) -> list[set[int]]:
    """Return the experts that vLLM-Ascend's operator chooses, called with vLLM-Ascend's arguments."""
    _, experts, _ = torch.ops.npu.npu_moe_gating_top_k(
        scores, k=TOP_K, bias=bias, k_group=4, group_count=8, group_select_mode=1, renorm=0, norm_type=1,
        routed_scaling_factor=1, eps=1e-20,
    )  # fmt: skip
    return [set(row) for row in experts.tolist()]


def transformers_choice(published: DeepseekV3TopkRouter, tokens: torch.Tensor) -> list[set[int]]:
    scores = torch.nn.functional.linear(tokens.float(), published.weight.float()).sigmoid()
    return [set(row) for row in published.get_topk_indices(scores).tolist()]


def differing(left: list[set[int]], right: list[set[int]]) -> float:
    return sum(mine != other for mine, other in zip(left, right, strict=True)) / len(left)


def test_rollout_chooses_transformers_experts(published, tokens):
    from verl_patches.features.router_precision.gate import use_float32

    gate = rollout_gate(published)
    shared = gate.e_score_correction_bias
    use_float32(gate)
    load(gate, published)
    assert gate.e_score_correction_bias is shared and shared.dtype == torch.float32
    scores = gate.quant_method.apply(gate, tokens.npu())
    assert scores.dtype == torch.float32
    assert differing(kernels_choice(scores, shared), transformers_choice(published, tokens)) == 0


def test_rounded_bias_chooses_other_experts(published, tokens):
    """The control: the gate as upstream builds it."""
    gate = load(rollout_gate(published), published)
    scores = torch.nn.functional.linear(tokens.npu(), gate.weight)
    assert differing(kernels_choice(scores, gate.e_score_correction_bias), transformers_choice(published, tokens)) > 0.3


def test_gate_without_bias_scores_in_float32(tokens):
    """This is Qwen3-MoE's gate."""
    from verl_patches.features.router_precision.gate import use_float32

    gate = torch.nn.Module()
    gate.weight = torch.nn.Parameter(torch.randn(128, HIDDEN).bfloat16(), requires_grad=False)
    use_float32(gate)
    expected = tokens.double() @ gate.weight.double().t()
    torch.testing.assert_close(gate.quant_method.apply(gate, tokens).double(), expected, rtol=1e-5, atol=1e-5)
    assert gate.weight.dtype == torch.bfloat16


def test_training_model_keeps_float32_bias_when_cast(published):
    """Megatron's Float16Module casts MindSpeed-LLM's model in the same way, buffers included."""
    from post_training.models.expert_bias import float32_expert_bias

    class Model(torch.nn.Sequential):
        def _apply(self, fn, recurse=True):
            with float32_expert_bias(self):
                super()._apply(fn, recurse)
            return self

    router = torch.nn.Linear(2, 2)
    router.register_buffer("expert_bias", published.e_score_correction_bias.clone())
    router.register_buffer("counts", torch.ones(2))
    model = Model(torch.nn.Sequential(router)).bfloat16()
    assert router.weight.dtype == router.counts.dtype == torch.bfloat16
    assert torch.equal(model.state_dict()["0.0.expert_bias"], published.e_score_correction_bias)
    assert model.npu()[0][0].expert_bias.device.type == "npu"
