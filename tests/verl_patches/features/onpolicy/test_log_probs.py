import torch

from verl_patches.features.onpolicy.log_probs import absent_log_probs, response_log_probs


def test_what_is_absent_cannot_be_used_unnoticed():
    absent = absent_log_probs(torch.zeros(2, 3, dtype=torch.int64))
    assert absent.shape == (2, 3) and absent.dtype == torch.float32 and absent.isnan().all()


def test_columns_that_predict_the_response():
    sequence = torch.arange(6).view(1, 6)
    assert response_log_probs(sequence, 2).tolist() == [[3, 4]]
