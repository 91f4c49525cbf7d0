"""Log-probs of responses, compared token by token with the sequence's."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_patches.features.onpolicy.log_probs import response_log_probs


def test_columns_that_predict_the_response():
    sequence = torch.arange(6).view(1, 6)
    assert response_log_probs(sequence, 2).tolist() == [[3, 4]]


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
def test_token_has_the_log_prob_of_the_place_before(rows, prompt, response):
    """verl's output at position p is for token p + 1; the last position predicts nothing."""
    drawn = torch.Generator().manual_seed(rows * 100 + prompt * 10 + response)
    logits = torch.randn(rows, prompt + response, 7, generator=drawn)
    tokens = torch.randint(0, 7, (rows, prompt + response), generator=drawn)
    of_places = logits.log_softmax(-1).gather(-1, tokens.roll(-1, dims=1)[..., None]).squeeze(-1)
    found = response_log_probs(of_places, response)
    assert found.shape == (rows, response)
    for row in range(rows):
        for place in range(response):
            token = tokens[row, prompt + place]
            assert found[row, place] == logits[row, prompt + place - 1].log_softmax(-1)[token]
