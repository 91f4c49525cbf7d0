"""Prompts go to workers by the lengths of their previous answers, and answers come back in the original order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl import DataProto

from post_training.plan.first_placement import first_placement
from verl_patches.features.first_placement import driver
from verl_patches.features.first_placement.driver import Placement, names_of, rows_of
from verl_patches.features.sample_handles.handles import DriverOfHandles

WIDTH = 12


def batch_of(prompts: list[int], **meta: Any) -> DataProto:
    """Return prompts of one token and one padding token, as verl's loop passes them."""
    tokens = torch.tensor([[0, prompt] for prompt in prompts])
    columns = {"raw_prompt_ids": np.array([[prompt] for prompt in prompts] + [None], dtype=object)[:-1]}
    return DataProto.from_dict(
        {"input_ids": tokens, "attention_mask": tokens.ne(0).long(), "position_ids": tokens}, columns, meta_info=meta
    )


class Workers:
    """Workers whose answers have a length given by the prompt, and the prompt's and the answer's number as tokens."""

    def __init__(self, length: Callable[[int, int], int], n: int = 1) -> None:
        self._length, self._n = length, n
        self.asked: list[list[int]] = []

    def generate(self, prompts: DataProto) -> DataProto:
        asked = prompts.batch["input_ids"][:, 1].tolist()
        assert asked == [each[0] for each in prompts.non_tensor_batch["raw_prompt_ids"]]
        self.asked.append(asked)
        rows = [(prompt, number) for prompt in asked for number in range(self._n)]
        lengths = torch.tensor([self._length(*row) for row in rows])
        behind = (torch.arange(WIDTH)[None] < lengths[:, None]).long()
        mask = torch.cat((torch.tensor([[0, 1]]).expand(len(rows), 2), behind), dim=-1)
        tokens = torch.tensor([[prompt, number] for prompt, number in rows])
        return DataProto.from_dict(
            {"prompts": tokens, "responses": behind, "attention_mask": mask}, meta_info=dict(prompts.meta_info)
        )


def answers(found: DataProto) -> list[list[int]]:
    return found.batch["prompts"].tolist()


def in_order(prompts: list[int], n: int) -> list[list[int]]:
    return [[prompt, number] for prompt in prompts for number in range(n)]


@settings(max_examples=50)
@given(st.data())
def test_answers_come_back_in_the_order_of_prompts_and_the_next_epoch_is_placed(data):
    engines, each, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    prompts = data.draw(st.lists(st.integers(1, 50), min_size=engines * each, max_size=engines * each, unique=True))
    lengths = {prompt: data.draw(st.integers(1, WIDTH)) for prompt in prompts}
    workers = Workers(lambda prompt, number: lengths[prompt], n)
    generate = Placement(engines).placing(workers.generate)
    assert answers(generate(batch_of(prompts))) == in_order(prompts, n) and workers.asked == [prompts]
    again = data.draw(st.permutations(prompts))
    assert answers(generate(batch_of(again))) == in_order(again, n)
    order = first_placement([lengths[prompt] for prompt in again], engines)
    assert workers.asked[1] == [again[place] for place in order]


def test_answers_that_stay_where_they_were_dealt_out_are_found(monkeypatch):
    """A control: answers are not put back into the prompts' order."""
    lengths = {1: 1, 2: 9, 3: 9, 4: 1}
    prompts = [2, 3, 1, 4]
    workers = Workers(lambda prompt, number: lengths[prompt], 2)
    generate = Placement(2).placing(workers.generate)
    generate(batch_of(prompts))
    assert answers(generate(batch_of(prompts))) == in_order(prompts, 2) and workers.asked[1] != prompts
    monkeypatch.setattr(driver, "_places", lambda order, n: list(range(len(order) * n)))
    assert answers(generate(batch_of(prompts))) != in_order(prompts, 2)


def test_the_mean_of_the_answers_counts_and_the_last_ones_do():
    now = {"first": True}
    workers = Workers(lambda prompt, number: 1 + number if now["first"] else 4, 3)
    placement = Placement(2)
    generate = placement.placing(workers.generate)
    generate(batch_of([5, 6]))
    assert sorted(placement.state().values()) == [2.0, 2.0]
    now["first"] = False
    generate(batch_of([5, 7]))
    assert sorted(placement.state().values()) == [2.0, 4.0, 4.0]


@pytest.mark.parametrize("mark", [{"validate": True}, {"do_sample": False}])
def test_other_answers_are_neither_placed_nor_counted(mark):
    placement = Placement(2)
    workers = Workers(lambda prompt, number: prompt)
    generate = placement.placing(workers.generate)
    generate(batch_of([1, 2, 9, 8], **mark))
    assert placement.state() == {}
    generate(batch_of([1, 2, 9, 8]))
    generate(batch_of([9, 8, 1, 2], **mark))
    assert workers.asked[-1] == [9, 8, 1, 2]


def test_a_run_that_goes_on_places_as_the_unbroken_one():
    workers = Workers(lambda prompt, number: prompt)
    before, after = Placement(2), Placement(2)
    before.placing(workers.generate)(batch_of([1, 2, 9, 8]))
    after.restore(json.loads(json.dumps(before.state())))
    after.placing(workers.generate)(batch_of([9, 8, 1, 2]))
    before.placing(workers.generate)(batch_of([9, 8, 1, 2]))
    assert workers.asked[1] == workers.asked[2] != [9, 8, 1, 2]


def test_prompts_that_do_not_divide_among_engines_are_passed_on():
    workers = Workers(lambda prompt, number: prompt)
    generate = Placement(2).placing(workers.generate)
    for prompts in ([1, 9, 8], [9, 8, 1]):
        assert answers(generate(batch_of(prompts))) == in_order(prompts, 1)
    assert workers.asked == [[1, 9, 8], [9, 8, 1]]


def test_handles_of_samples_go_with_the_answers():
    """Samples stay with the engine that made them, so their references follow the order in which prompts were dealt."""
    workers = Workers(lambda prompt, number: prompt, 2)
    generate = Placement(2).placing(DriverOfHandles(lambda order: order, lambda: 1).generating(workers.generate))
    generate(batch_of([1, 2, 9, 8]))
    found = generate(batch_of([9, 8, 1, 2]))
    dealt = [prompt for prompt in workers.asked[1] for _ in range(2)]
    ids = (found.batch["sample_id"] - 8).tolist()
    assert sorted(ids) == list(range(8)) and [dealt[each] for each in ids] == [9, 9, 8, 8, 1, 1, 2, 2]
    assert found.batch["sample_lengths"][:, 1].tolist() == [9, 9, 8, 8, 1, 1, 2, 2]


def test_the_same_tokens_have_the_same_name_however_they_are_padded():
    tokens = torch.tensor([[0, 3, 4], [3, 4, 5], [0, 0, 4]])
    wide = DataProto.from_dict({"input_ids": tokens, "attention_mask": tokens.ne(0).long()})
    narrow = DataProto.from_dict({"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 2).long()})
    names = names_of(wide)
    assert len(set(names)) == 3 and names_of(narrow) == names[:1]


def test_rows_leave_the_batch_that_they_are_of_as_it_was():
    batch = batch_of([1, 2, 3])
    assert rows_of(batch, [2, 0]).batch["input_ids"][:, 1].tolist() == [3, 1]
    assert batch.batch["input_ids"][:, 1].tolist() == [1, 2, 3]
