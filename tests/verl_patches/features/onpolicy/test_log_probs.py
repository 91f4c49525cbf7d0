import torch

from verl_patches.features.onpolicy.log_probs import response_log_probs


def test_columns_that_predict_the_response():
    sequence = torch.arange(6).view(1, 6)
    assert response_log_probs(sequence, 2).tolist() == [[3, 4]]
