"""No prompt is lost and none repeats within an epoch, whichever prompts are returned to the queue."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.features.data_order.order import DataOrder, DataOrderError
from verl_patches.features.dynamic_sampling.queue import Prompt, PromptQueue

SEED = 5


def queue(rows=7, epochs=3, seed=SEED, used=None):
    return PromptQueue(DataOrder(rows, 2, seed), epochs, used)


def in_order(rows, epochs, used=None):
    order = DataOrder(rows, 2, SEED)
    return [Prompt(epoch, row) for epoch in range(epochs) for row in order.permutation(epoch)[:used]]


@settings(max_examples=80)
@given(st.integers(1, 9), st.integers(1, 4), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12))), st.data())
def test_taking_and_giving_back_is_a_list(rows, epochs, moves, data):
    """The naive queue is the whole list of prompts; saving the state as JSON changes nothing. The last rows of an epoch
    may be dropped if they do not fill a batch."""
    used = data.draw(st.one_of(st.none(), st.integers(1, rows)))
    reference, ours = in_order(rows, epochs, used), queue(rows, epochs, used=used)
    for count, back in moves:
        taken = ours.take(count)
        assert taken == reference[:count]
        reference = reference[count:]
        returned = taken[len(taken) - min(back, len(taken)) :]
        ours.give_back(returned)
        reference = returned + reference
        if data.draw(st.booleans()):
            state = json.loads(json.dumps(ours.state_dict()))
            ours = queue(rows, epochs, used=used)
            ours.load_state_dict(state)
    rest = ours.take(10**6)
    assert rest == reference and max(Counter(rest).values(), default=1) == 1


def test_the_epoch_is_that_of_the_next_new_prompt():
    ours = queue(4, 2)
    assert ours.epoch == 0
    first = ours.take(4)
    assert ours.epoch == 1
    ours.give_back(first[2:])
    assert ours.epoch == 1 and [p.epoch for p in ours.take(3)] == [0, 0, 1]
    assert len(ours.take(9)) == 3 and ours.take(1) == [] and ours.epoch == 1, "the last epoch has no successor"


def test_lost_prompt_detected():
    ours = queue(4, 1)
    ours.take(3)
    assert Counter(ours.take(9)) != Counter(in_order(4, 1))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": 8}, "rows of data.train_files=8, but this run has 7"),
        ({"seed": 6}, "data.seed=6, but this run has 5"),
        ({"seed": None}, "data.seed=None, but this run has 5"),
        ({"position": 7}, "epoch 0 and row 7 after 0 returned prompts, does not exist in 7 rows"),
        ({"epoch": -1}, "epoch -1 and row 2"),
        ({"returned": [[0, 7]]}, "after 1 returned prompts, does not exist"),
        ({"returned": [3]}, "written with algorithm.filter_groups.enable=False"),
    ],
)
def test_a_state_of_other_data_rejected(change, sentence):
    first = queue()
    first.take(2)
    queue().load_state_dict(first.state_dict())
    with pytest.raises(DataOrderError, match=sentence):
        queue().load_state_dict(first.state_dict() | change)
    with pytest.raises(DataOrderError, match="enable=False"):
        queue().load_state_dict({"epoch": 1, "position": 2, "rows": 7, "batch_size": 2, "seed": SEED})
