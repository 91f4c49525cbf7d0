import math
from types import SimpleNamespace

import pytest
import torch
import torch_npu  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.features.measure import step_record
from verl_patches.features.measure.step_record import LogProbDifference, StepRecord, agreed, finish_step


@settings(max_examples=50)
@given(
    metrics=st.dictionaries(
        st.text(min_size=1, max_size=5), st.floats(min_value=0, allow_nan=False, width=64), min_size=1
    )
)
def test_agreement_keeps_every_digit(lone_rank, metrics):
    assert step_record.largest_over_ranks(metrics) == metrics


def test_nan_is_kept_and_negative_metrics_rejected(lone_rank):
    for sign in (1, -1):  # the processor's inf - inf has the sign bit set
        nan = math.copysign(float("nan"), sign)
        assert math.isnan(step_record.largest_over_ranks({"a": nan})["a"])
        bits = torch.tensor([nan], dtype=torch.float64).view(torch.int64)
        assert (bits < 0).item() == (sign < 0)
    with pytest.raises(ValueError, match="negative metric"):
        step_record.largest_over_ranks({"a": -1.0})


@pytest.mark.parametrize("sign", [1, -1])
def test_nan_of_one_rank_is_the_largest_metric(lone_rank, monkeypatch, sign):
    def with_another_rank(bits, op, group):
        bits.clamp_(min=torch.tensor(1.0, dtype=torch.float64).view(torch.int64).item())

    monkeypatch.setattr(step_record, "agree_on_names", lambda names, group: None)
    monkeypatch.setattr(step_record.dist, "all_reduce", with_another_rank)
    assert step_record.largest_over_ranks({"a": 0.5}) == {"a": 1.0}
    assert math.isnan(step_record.largest_over_ranks({"a": math.copysign(float("nan"), sign)})["a"])


def test_difference_looks_only_at_the_masked_tokens():
    difference = LogProbDifference()
    rollout = torch.tensor([[-1.0, -2.0, -1.0]])
    training = torch.tensor([[-1.5, -2.25, -9.0]], requires_grad=True)
    difference.add(rollout, training, torch.tensor([[1, 1, 0]]))
    difference.add(rollout, training, torch.tensor([[0, 0, 0]]))
    assert (difference.largest, difference.total, difference.tokens) == (0.5, 0.75, 2)


def test_difference_does_not_hide_nan():
    difference = LogProbDifference()
    ones = torch.ones(1, 1)
    difference.add(ones, ones * float("nan"), ones)
    difference.add(ones, ones, ones)
    assert math.isnan(difference.largest)


def test_difference_of_device_that_drops_nan_is_nan(monkeypatch):
    """CANN does not document that a maximum propagates NaN."""
    upstream = torch.Tensor.max
    monkeypatch.setattr(torch.Tensor, "max", lambda tensor: upstream(tensor.nan_to_num(0.0)))
    difference, ones = LogProbDifference(), torch.ones(1, 2)
    difference.add(ones, torch.tensor([[float("nan"), 2.0]]), ones)
    assert math.isnan(difference.largest) and math.isnan(difference.total)


def test_a_step_is_reported_once_and_the_next_begins_empty(lone_rank, own_context):
    record = step_record.current_record()
    with record.timed("reshard"):
        pass
    record.memory("update", peak=10, allocated=4)
    record.memory("update", peak=7, allocated=5)
    record.count("actor/nonfinite_steps", 2)
    record.count("actor/nonfinite_steps")
    ones = torch.ones(2, 3)
    record.difference.add(ones, ones * 3, ones)
    metrics = finish_step()
    assert metrics["timing_s/reshard"] > 0
    assert metrics["memory/peak_bytes/update"] == 10 and metrics["memory/allocated_bytes/update"] == 5
    assert metrics["actor/nonfinite_steps"] == 3
    assert metrics["training/rollout_logprob_diff_max"] == 2
    assert metrics["training/rollout_logprob_diff_mean"] == 2
    assert step_record.current_record() == StepRecord()


def test_means_are_over_the_tokens_of_all_micro_batches(lone_rank):
    """Micro batches and draws have different sizes, so a mean of means would be wrong."""
    record = StepRecord()
    for rows, apart in ((1, 3.0), (3, 1.0)):
        zeros = torch.zeros(rows, 2)
        record.difference.add(zeros, zeros + apart, torch.ones(rows, 2))
    record.drew(1.8, 2)
    record.drew(3.0, 6)
    found = agreed(record)
    assert found["training/rollout_logprob_diff_mean"] == pytest.approx((1 * 3 + 3 * 1) / 4)
    assert found["training/rollout_logprob_diff_max"] == 3
    assert found["rollout/kept_probability"] == pytest.approx(4.8 / 8)


def test_without_tokens_no_difference_is_claimed(lone_rank):
    assert not any("logprob_diff" in name for name in agreed(StepRecord()))


def test_a_start_counts_once_and_the_skew_is_from_the_first_to_the_last(lone_rank, monkeypatch):
    record, clock = StepRecord(), iter([1000.0, 1007.0])
    monkeypatch.setattr(step_record, "time", SimpleNamespace(time=lambda: next(clock)))
    record.began("ref")
    record.began("ref")
    assert record.starts == {"ref": 1000.0}
    assert agreed(record) == {"timing_start_skew/ref": 0.0}

    def with_a_later_rank(tensor, op=None, group=None):
        """Reduce with a rank that began 2.5 s later. In order: first start, last start, log-prob difference."""
        if tensor.dtype == torch.int64:
            other = torch.tensor([step_record._FAR_AHEAD - 1002.5, 1002.5, 0.0], dtype=torch.float64).view(torch.int64)
            tensor.copy_(torch.maximum(tensor.cpu(), other))

    monkeypatch.setattr(step_record, "agree_on_names", lambda names, group: None)
    monkeypatch.setattr(step_record.dist, "all_reduce", with_a_later_rank)
    assert agreed(record) == {"timing_start_skew/ref": 2.5}
