"""A rank combines only its own experts: plain torch is the reference, vLLM-Ascend's dispatcher the control."""

import pytest
import torch
import torch_npu  # noqa: F401
from vllm_ascend.ops.fused_moe.moe_comm_method import _MoECommMethods
from vllm_ascend.ops.fused_moe.moe_runtime_args import MoEAllGatherCombineMetadata
from vllm_ascend.ops.fused_moe.token_dispatcher import TokenDispatcherWithAllGather

from verl_plugin.rollout.experts import FiniteCombine, redirect_to_zeros

NAN = float("nan")
ELSEWHERE = -1
# Row of each of four tokens' two experts; five are on this rank.
PLACES = [3, 0, ELSEWHERE, 1, ELSEWHERE, ELSEWHERE, 2, 4]


def outputs_of(places, broken):
    """Make outputs of this rank's experts in the first rows; the rows after them, and the rows `broken`, are NaN."""
    rows = torch.randn(len(places), 16, generator=torch.Generator().manual_seed(1))
    rows[sum(place != ELSEWHERE for place in places) :] = NAN
    rows[list(broken)] = NAN
    return rows


def weights_of(places):
    """Draw each token's weights for its two experts; they are 0 for experts of other ranks, as in vLLM-Ascend."""
    drawn = torch.rand(len(places) // 2, 2, generator=torch.Generator().manual_seed(2)) + 0.1
    return drawn * (torch.tensor(places) != ELSEWHERE).view(-1, 2)


def expected(outputs, places, weights):
    """Return the weighted sum over this rank's experts."""
    sums = torch.zeros(len(places) // 2, outputs.shape[1])
    for number, place in enumerate(places):
        if place != ELSEWHERE:
            sums[number // 2] += weights.flatten()[number] * outputs[place]
    return sums


def combined(dispatcher, outputs, places, weights):
    metadata = MoEAllGatherCombineMetadata(
        topk_weights=weights.npu(),
        expanded_row_idx=torch.tensor(places, dtype=torch.int32).npu(),
        restore_shape=torch.Size((len(places) // 2, outputs.shape[1])),
    )
    return dispatcher(top_k=2).token_combine(outputs.clone().npu(), metadata).cpu()


@pytest.mark.parametrize(
    ("places", "broken"),
    [
        (PLACES, []),
        (PLACES, [1]),  # second token's row, which upstream reads for all experts of other ranks
        (PLACES, [0, 3]),
        ([ELSEWHERE] * 8, []),  # no row belongs to this rank
        ([2, 0, 1, 3, 7, 5, 4, 6], []),  # all rows belong to this rank, including the last
    ],
    ids=["whole", "row 1 broken", "own rows broken", "nothing here", "all here"],
)
def test_token_is_the_sum_over_its_experts_here(places, broken):
    outputs, weights = outputs_of(places, broken), weights_of(places)
    found = combined(FiniteCombine, outputs, places, weights)
    torch.testing.assert_close(found, expected(outputs, places, weights), equal_nan=True)


def test_upstream_spreads_what_is_not_finite():
    """Control: with a non-finite row 1, upstream corrupts the third token, which has no expert on this rank."""
    outputs, weights = outputs_of(PLACES, [1]), weights_of(PLACES)
    found = combined(TokenDispatcherWithAllGather, outputs, PLACES, weights)
    assert found[2].isnan().all() and not expected(outputs, PLACES, weights)[2].any()


def test_places_keep_type_and_this_ranks_rows():
    outputs = torch.ones(8, 4).npu()
    places = redirect_to_zeros(outputs, torch.tensor(PLACES, dtype=torch.int32).npu())
    assert places.dtype == torch.int32 and places.tolist() == [3, 0, 7, 1, 7, 7, 2, 4]
    assert outputs.sum(dim=1).tolist() == [4] * 7 + [0]


def test_worker_registers_it_after_the_layers(monkeypatch):
    """A model's layers register upstream's dispatcher when they are loaded; another chip's dispatcher stays."""
    from types import SimpleNamespace

    from vllm_ascend.ascend_forward_context import MoECommType
    from vllm_ascend.worker.worker import NPUWorker

    from verl_plugin.rollout.worker import RolloutWorker

    class OfAnotherChip(TokenDispatcherWithAllGather):
        pass

    config = SimpleNamespace(experts_per_token=2, num_experts=8, num_local_experts=4)
    for dispatcher, kept in ((TokenDispatcherWithAllGather, FiniteCombine), (OfAnotherChip, OfAnotherChip)):
        method = SimpleNamespace(moe_config=config, token_dispatcher=dispatcher())
        monkeypatch.setattr(
            NPUWorker,
            "load_model",
            lambda worker, method=method: _MoECommMethods.update({MoECommType.ALLGATHER: method}),
        )
        monkeypatch.setattr(RolloutWorker, "__init__", lambda worker: None)
        RolloutWorker().load_model()
        assert type(method.token_dispatcher) is kept
    monkeypatch.delitem(_MoECommMethods, MoECommType.ALLGATHER)
    monkeypatch.setattr(NPUWorker, "load_model", lambda worker: None)
    RolloutWorker().load_model()  # a model without experts
