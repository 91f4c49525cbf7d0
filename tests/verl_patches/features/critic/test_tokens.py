"""Which tokens of a micro batch have a value, and which mask the critic's loss uses."""

import torch

from verl_patches.features.critic.tokens import LastForward, response_mask, values_of_tokens

# Answers of 2 and 0 tokens to prompts of 2 and 1 tokens, padded to 2 + 4; prompts are padded on the left.
BATCH = {
    "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0]]),
    "responses": torch.zeros(2, 4, dtype=torch.int64),
}


def test_the_tokens_of_answers_have_a_value_and_no_other():
    assert response_mask(BATCH).tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]
    values = torch.tensor([[0.5, 1.5, 2.5, 3.5]] * 2, dtype=torch.bfloat16)
    found = values_of_tokens(values, BATCH)
    assert found.dtype == torch.float32
    assert found.tolist() == [[0.5, 1.5, 0.0, 0.0], [0.0] * 4]


def test_the_loss_takes_the_mask_of_the_last_forward_and_the_given_one_before_any():
    given, first, second = (torch.full((1, 2), float(value)) for value in range(3))
    last = LastForward()
    assert last.mask(given) is given
    last.hold(first)
    assert last.mask(given) is first
    last.hold(second)
    assert last.mask(given) is second
