"""Effects of the patches of MindSpeed."""

import torch

from tests.demonstrations import demonstrates
from verl_patches.features.chunked_log_probs.feature import CHUNKED_LOG_PROBS


@demonstrates("mindspeed.core.tensor_parallel.cross_entropy:calculate_predicted_logits", CHUNKED_LOG_PROBS)
def exponentials_lie_where_the_logits_were(body):
    def upstream(logits, target, maximum, first, end):
        return (torch.exp(logits - maximum.unsqueeze(-1)),)

    logits = torch.tensor([[1.0, 3.0]])
    *_, exponentials = body(upstream, logits, torch.tensor([1]), torch.tensor([3.0]), 0, 2)
    return exponentials.data_ptr() == logits.data_ptr()
