"""Sample references combined with the exclusion of cut answers from the update, on one die."""

from __future__ import annotations

import pytest
import torch
import torch_npu  # noqa: F401
from tensordict import TensorDict
from verl import DataProto

from verl_patches.features.overlong.filtering import filtering, without_truncated
from verl_patches.features.sample_handles.handles import DriverOfHandles
from verl_patches.features.sample_handles.store import SampleStore

PADDING, END, PROMPT, RESPONSE = 0, 9, 4, 6
PROMPTS, RESPONSES = [4, 2, 3, 1], [6, 6, 3, 6]
"""The first answer fills the width and ends with the end token, the other full ones are cut; the third is short."""
CUT = [False, True, False, True]


def answers(with_log_probs: bool) -> DataProto:
    """Return a generation's answers as verl's worker passes them to the driver."""
    made = torch.Generator().manual_seed(2)
    places = torch.arange(-PROMPT, RESPONSE)[None]
    lengths = torch.tensor(PROMPTS)[:, None], torch.tensor(RESPONSES)[:, None]
    attention = ((places >= -lengths[0]) & (places < lengths[1])).long()
    ids = torch.randint(10, 1000, attention.shape, generator=made) * attention
    for row, cut in enumerate(CUT):
        ids[row, PROMPT + RESPONSES[row] - 1] = 11 if cut else END
    columns = {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (places + lengths[0]).clamp(min=0),
    }
    if with_log_probs:
        drawn = -torch.rand(attention.shape, generator=made)[:, PROMPT:]
        columns["rollout_log_probs"] = drawn.masked_fill(attention[:, PROMPT:] == 0, -1.0)
    return DataProto.from_dict(columns)


def reference(batch: DataProto) -> DataProto:
    return DataProto.from_dict({"ref_log_prob": batch.batch["responses"].float().cpu() * -0.5 - 1})


@pytest.mark.parametrize("with_log_probs", [False, True])
@pytest.mark.parametrize("one_advantage", [True, False], ids=["of answers", "of tokens"])
def test_cut_answers_count_nowhere_in_the_update(lone_rank, with_log_probs, one_advantage):
    """In every column, the update's batch is the one that verl would have sent through the same filter."""
    store, driver = SampleStore(), DriverOfHandles(lambda each: each, lambda: 1)
    whole = answers(with_log_probs)
    device, kept = torch.device("npu", 0), {}

    def workers(prompts: DataProto) -> DataProto:
        return store.keep(answers(with_log_probs), {**prompts.meta_info, "pad_token_id": PADDING}, device)

    seen = driver.generating(workers)(DataProto(batch=TensorDict({}, batch_size=[len(CUT)])))
    driver.asking(lambda handles: store.log_probs(reference, handles, 0))(seen)
    counted = whole.batch["attention_mask"][:, PROMPT:]
    columns = {"response_mask": counted.clone()}
    columns["advantages"] = torch.full(counted.shape, 0.5) if one_advantage else torch.randn(counted.shape)
    columns["advantages"] *= counted
    expected = whole.union(reference(whole))
    for batch in (seen, expected):
        batch.batch.update({name: values.clone() for name, values in columns.items()})

    def update(handles: DataProto) -> DataProto:
        return store.update(lambda batch: kept.update(batch.batch.items()) or DataProto(), handles, 0)

    filtering(driver.updating(update), frozenset([END]))(seen)
    left = without_truncated(expected, frozenset([END])).batch
    assert [bool(row.any()) for row in left["response_mask"]] == [not cut for cut in CUT]
    for name, values in left.items():
        found = kept[name].cpu()
        if name in ("advantages", "ref_log_prob"):  # irrelevant where no token counts
            found, values = (each * left["response_mask"] for each in (found, values))
        assert torch.equal(found, values), name


@pytest.mark.parametrize("with_log_probs", [False, True])
def test_every_order_of_a_step_has_its_own_samples(lone_rank, with_log_probs):
    """A caller that drops or sorts rows between two calls of a step gets those rows, not those of the previous call."""
    store, driver = SampleStore(), DriverOfHandles(lambda each: each, lambda: 1)
    device, whole = torch.device("npu", 0), answers(with_log_probs)

    def workers(prompts: DataProto) -> DataProto:
        return store.keep(answers(with_log_probs), {**prompts.meta_info, "pad_token_id": PADDING}, device)

    def generated() -> DataProto:
        return driver.generating(workers)(DataProto(batch=TensorDict({}, batch_size=[len(CUT)])))

    first, second = generated(), generated()
    for seen, order in ((first, [0, 1, 2, 3]), (first, [3, 1, 0, 2]), (first, [2, 0]), (second, [1, 3, 2, 0])):
        found = store.batch_of(driver.handles(seen[order]), 0).batch
        for name, values in whole[order].batch.items():
            assert torch.equal(found[name].cpu(), values), (name, order)


def test_second_step_has_samples_of_its_own(lone_rank):
    """Its answers have the lengths of the first step's in another order; an update has trained on those."""
    store, driver = SampleStore(), DriverOfHandles(lambda each: each, lambda: 1)
    for order in ([0, 1, 2, 3], [2, 3, 0, 1]):
        whole = answers(True)[order][[3, 1, 0, 2]]

        def workers(prompts: DataProto, order: list[int] = order) -> DataProto:
            asked = {**prompts.meta_info, "pad_token_id": PADDING}
            return store.keep(answers(True)[order], asked, torch.device("npu", 0))

        seen = driver.generating(workers)(DataProto(batch=TensorDict({}, batch_size=[len(CUT)])))[[3, 1, 0, 2]]
        found = store.batch_of(driver.handles(seen), 0).batch
        for name, values in whole.batch.items():
            assert torch.equal(found[name].cpu(), values), (name, order)
        store.update(lambda batch: DataProto(), driver.handles(seen), 0)
