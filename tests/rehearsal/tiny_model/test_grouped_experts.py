"""Grouped experts give the same values and gradients as transformers' loop over expert modules."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rehearsal.tiny_model.architecture import tiny_config
from rehearsal.tiny_model.grouped_experts import group_experts_of, grouped_experts


@pytest.fixture(params=["deepseek_v3", "qwen3_moe"])
def models(request) -> tuple[PreTrainedModel, PreTrainedModel, list[torch.nn.Parameter]]:
    """Transformers' looped model, the same weights grouped, and the grouped tensors of the last layer."""
    torch.manual_seed(0)
    config = tiny_config(0, 1, 2, request.param)
    config.n_routed_experts = config.num_experts = 32
    config.num_hidden_layers = 2
    loop = AutoModelForCausalLM.from_config(config)
    for name, bias in loop.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.uniform_(-0.1, 0.1)
    grouped = copy.deepcopy(loop)
    return loop, grouped, group_experts_of(grouped)[-2:]


def backward(model: PreTrainedModel) -> torch.Tensor:
    rows = torch.randint(512, (4, 12), generator=torch.Generator().manual_seed(1))
    output = model(input_ids=rows, labels=rows)
    output.loss.backward()
    return output.logits.detach()


def test_logits_and_all_gradients_equal_the_loop(models):
    loop, grouped, (gate_up, down) = models
    torch.testing.assert_close(backward(grouped), backward(loop), rtol=0, atol=1e-5)
    for (name, expected), parameter in zip(loop.named_parameters(), grouped.parameters(), strict=True):
        if "mlp.experts" not in name:
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-7)
    for index, expert in enumerate(loop.model.layers[1].mlp.experts):
        gate_grad, up_grad = gate_up.grad[index].chunk(2)
        for found, linear in (
            (gate_grad, expert.gate_proj),
            (up_grad, expert.up_proj),
            (down.grad[index], expert.down_proj),
        ):
            # An expert without tokens has no gradient in the loop, and zeros here.
            expected = torch.zeros_like(found) if linear.weight.grad is None else linear.weight.grad
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_the_comparison_sees_exchanged_gate_and_up(models):
    loop, grouped, (gate_up, _) = models
    gate_up.data = gate_up.data.roll(gate_up.shape[1] // 2, dims=1)
    assert not torch.allclose(backward(grouped), backward(loop), rtol=0, atol=1e-5)


def test_the_modules_follow_updates_of_the_grouped_tensors(models):
    _, grouped, (gate_up, down) = models
    with torch.no_grad():
        gate_up.add_(1.0)
        down.mul_(2.0)
    state = grouped.state_dict()
    prefix = "model.layers.1.mlp.experts.5"
    torch.testing.assert_close(state[f"{prefix}.gate_proj.weight"], gate_up[5].chunk(2)[0])
    torch.testing.assert_close(state[f"{prefix}.up_proj.weight"], gate_up[5].chunk(2)[1])
    torch.testing.assert_close(state[f"{prefix}.down_proj.weight"], down[5])


def test_gradients_pass_a_numerical_check():
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    expert_ids = torch.tensor([[0, 2], [2, 3], [0, 3]])
    inputs = draw(4, 6, 5), draw(4, 5, 3), draw(3, 5), expert_ids, draw(3, 2)
    assert torch.autograd.gradcheck(grouped_experts, inputs)
