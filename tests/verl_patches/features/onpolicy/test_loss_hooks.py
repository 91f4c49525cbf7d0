from functools import partial

import pytest
import torch

from verl_patches.features.measure import step_record
from verl_patches.features.onpolicy.loss_hooks import with_measured_difference, with_own_log_probs
from verl_patches.features.onpolicy.selection import UpdateColumns

# Each test starts with an empty step record.
pytestmark = pytest.mark.usefixtures("own_context")


def micro_batch():
    return {
        "responses": torch.zeros(2, 3, dtype=torch.int64),
        "attention_mask": torch.ones(2, 5),
        "old_log_probs": torch.full((2, 3), torch.nan),
        "rollout_log_probs": torch.full((2, 3), -1.0),
    }


def megatron_schedule(*, forward_step_func, forward_only, batches, model):
    """Run one forward as Megatron's schedules do, and call the loss function with the last stage's output."""
    output, loss = forward_step_func(iter(batches), model)
    return loss(output)


def both(schedule):
    return with_own_log_probs(with_measured_difference(schedule, False))


def run(forward_only, batch, log_probs, schedule=both):
    def loss(output, data, meta_info):
        return data["old_log_probs"], output["log_probs"]

    def forward_step(batches, model):
        return {"log_probs": log_probs}, partial(loss, data=next(batches), meta_info=None)

    return schedule(megatron_schedule)(
        forward_step_func=forward_step, forward_only=forward_only, batches=[batch], model=None
    )


def test_the_loss_finds_its_own_log_probs_without_their_gradient():
    log_probs = torch.randn(2, 5, requires_grad=True)
    old, _ = run(False, micro_batch(), log_probs)
    assert torch.equal(old, log_probs[:, 1:4]) and not old.requires_grad


def test_measuring_leaves_the_batch_unchanged():
    old, _ = run(False, micro_batch(), torch.randn(2, 5), partial(with_measured_difference, recomputed=False))
    assert old.isnan().all()
    assert step_record.current_record().difference.tokens == 6


def test_forward_only_passes_go_through_untouched():
    old, _ = run(True, micro_batch(), torch.randn(2, 5))
    assert old.isnan().all() and step_record.current_record().difference.tokens == 0


def test_the_distance_to_the_rollout_is_recorded():
    run(False, micro_batch(), torch.full((2, 5), -1.25))
    assert step_record.current_record().difference.largest == 0.25


@pytest.mark.parametrize(("recomputed", "largest"), [(True, 0.5), (False, 3.0)])
def test_an_update_after_the_first_compares_the_policy_that_sampled(recomputed, largest):
    """By then, the forward's own log-probs belong to another policy."""
    batch = micro_batch() | {"old_log_probs": torch.full((2, 3), -1.5)}
    run(False, batch, torch.full((2, 5), -4.0), partial(with_measured_difference, recomputed=recomputed))
    assert step_record.current_record().difference.largest == largest


def test_padding_behind_a_response_is_not_compared():
    batch = micro_batch()
    batch["attention_mask"][0, 4], batch["rollout_log_probs"][0, 2] = 0, -9.0
    run(False, batch, torch.full((2, 5), -1.25))
    difference = step_record.current_record().difference
    assert (difference.largest, difference.tokens) == (0.25, 5)


@pytest.mark.parametrize("recomputed", [True, False])
def test_several_micro_batches_are_one_naive_comparison(recomputed):
    """Rows and lengths are unequal, and there is noise wherever no token counts: before and behind an answer."""
    drawn, apart = torch.Generator().manual_seed(3), []
    for rows, prompt, response in ((2, 2, 3), (1, 4, 5), (3, 1, 4)):
        lengths = torch.randint(0, response + 1, (rows,), generator=drawn).tolist()
        whole, rollout, old = (
            torch.randn(rows, width, generator=drawn) for width in (prompt + response, response, response)
        )
        attention = torch.ones(rows, prompt + response)
        for row, length in enumerate(lengths):
            attention[row, prompt + length :] = 0
        batch = {
            "responses": torch.zeros(rows, response, dtype=torch.int64), "attention_mask": attention,
            "old_log_probs": old, "rollout_log_probs": rollout,
        }  # fmt: skip
        run(False, batch, whole, partial(with_measured_difference, recomputed=recomputed))
        for row, length in enumerate(lengths):
            for place in range(length):
                training = old[row, place] if recomputed else whole[row, prompt - 1 + place]
                apart.append(abs(float(rollout[row, place] - training)))
    difference = step_record.current_record().difference
    assert difference.tokens == len(apart) > 5
    assert (difference.largest, difference.total) == (pytest.approx(max(apart)), pytest.approx(sum(apart), rel=1e-5))


def test_without_rollout_log_probs_nothing_is_compared():
    batch = micro_batch()
    del batch["rollout_log_probs"]
    run(False, batch, torch.zeros(2, 5))
    assert step_record.current_record().difference.tokens == 0


class Data:
    """The part of DataProto that selects columns."""

    def __init__(self, **columns):
        self.batch = columns
        self.meta_info = {"temperature": 1.0}

    def select(self, batch_keys):
        return Data(**{name: self.batch[name] for name in batch_keys})


def test_a_selection_keeps_the_extra_columns_that_exist():
    data = UpdateColumns(Data(a=1, b=2, c=3), ("c", "d"), absent=["old"])
    assert data.select(batch_keys=["a"]).batch == {"a": 1, "c": 3}
    assert data.select(batch_keys=["c"]).batch == {"c": 3}
    assert data.select(batch_keys=["old", "b"]).batch == {"b": 2, "c": 3}
    with pytest.raises(KeyError, match="other"):
        data.select(batch_keys=["other"])
    assert data.meta_info == {"temperature": 1.0}
