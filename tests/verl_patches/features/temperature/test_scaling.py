import torch
import torch_npu  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.features.temperature.scaling import as_sampled, at_temperature, reporting


def log_prob(logits, label):
    return torch.log_softmax(logits, -1)[..., label]


@settings(max_examples=25)
@given(st.floats(0.1, 3.0))
def test_log_prob_and_gradient_are_those_of_the_scaled_distribution(temperature):
    leaf = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    value = at_temperature(log_prob, temperature)(leaf * 1.0, label=3)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    expected = log_prob(leaf / temperature, 3)
    (reference,) = torch.autograd.grad(expected.sum(), leaf)
    assert torch.allclose(value, expected) and torch.allclose(gradient, reference)


def test_at_one_the_processor_itself_is_used():
    assert at_temperature(log_prob, 1.0) is log_prob


def test_reported_logits_follow_each_request():
    logits = torch.tensor([[2.0, 4.0], [2.0, 4.0]]).npu()
    with reporting(torch.tensor([0.5, 0.0]).npu()):
        reported = as_sampled(logits)
    assert reported.cpu().tolist() == [[4.0, 8.0], [2.0, 4.0]]
    assert logits.cpu().tolist() == [[2.0, 4.0], [2.0, 4.0]]


def test_outside_a_block_and_for_greedy_batches_nothing_changes():
    logits = torch.ones(1, 2)
    assert as_sampled(logits) is logits
    with reporting(torch.tensor([2.0])):
        with reporting(None):
            assert as_sampled(logits) is logits
        assert as_sampled(logits).tolist() == [[0.5, 0.5]]
