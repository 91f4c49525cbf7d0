"""The decode loop counts every metric at every event, so that all ranks report the same names."""

from collections import deque
from types import SimpleNamespace

import pytest

from verl_patches.features.dp_sync import decode_loop
from verl_patches.features.dp_sync.decode_loop import METRICS, DecodeLoop, _count, _most_requests, _promise
from verl_patches.features.dp_sync.sync_window import LocalState
from verl_patches.features.measure import step_record


def test_an_event_counts_its_own_metrics_and_names_the_others(own_context):
    record = own_context.of(step_record.StepRecord)
    _count(agreements=1)
    _count(decode_steps=3, wasted_steps=1)
    counted = {name: record.counts[f"rollout/{name}"] for name in METRICS}
    assert counted == dict.fromkeys(METRICS, 0) | {"agreements": 1, "decode_steps": 3, "wasted_steps": 1}


def scheduler(requests, blocks=2, waiting=(), speculated=0):
    """Return an engine with blocks of 4 tokens.

    requests: for each, its tokens, how many are computed, how many it has answered, and the most it may answer.
    """
    running = [
        SimpleNamespace(
            request_id=str(place), num_tokens=tokens, num_computed_tokens=computed, num_output_tokens=answered,
            max_tokens=most,
        )
        for place, (tokens, computed, answered, most) in enumerate(requests)
    ]  # fmt: skip
    cache = SimpleNamespace(
        coordinator=SimpleNamespace(get_blocks=lambda request_id: ([0] * blocks, [0] * (blocks + 1))),
        block_pool=SimpleNamespace(num_gpu_blocks=10),
    )
    return SimpleNamespace(
        running=running, waiting=list(waiting), num_spec_tokens=speculated, max_model_len=16, block_size=4,
        kv_cache_manager=cache, max_num_running_reqs=8,
    )  # fmt: skip


DECODING = (5, 5, 1, 9)


@pytest.mark.parametrize(
    ("tokens", "with_prefill", "engine", "promised"),
    [
        # 5 of 8 slots are taken: this forward and three more fit; 8 answer tokens are missing.
        (1, False, scheduler([DECODING]), (4, 8)),
        (2, False, scheduler([DECODING, (7, 7, 3, 4)]), (4, 8)),
        # A request that ends within its blocks needs no more: by its last answer token, or at the maximum length.
        (1, False, scheduler([(7, 7, 3, 4)]), (20, 1)),
        (1, False, scheduler([(7, 7, 3, 20)], blocks=4), (20, 9)),
        (1, False, scheduler([(7, 7, 3, 20)], blocks=3), (6, 9)),
        (1, False, scheduler([DECODING], waiting=["another"]), (4, 20)),
        (0, False, scheduler([]), (20, 1)),
        # None of these is a plain decode step of one token for each running request.
        (1, True, scheduler([DECODING]), (1, 8)),
        (1, False, scheduler([DECODING], speculated=1), (1, 8)),
        (1, False, scheduler([DECODING, DECODING]), (1, 8)),
        (1, False, scheduler([(5, 3, 0, 9)]), (1, 9)),
    ],
)
def test_what_an_engine_promises(tokens, with_prefill, engine, promised):
    found = _promise(LocalState(8, tokens, with_prefill, False), engine, limit=20)
    assert (found.steps, found.work) == promised


def test_a_promise_is_no_longer_than_a_window():
    found = _promise(LocalState(8, 1, False, False), scheduler([DECODING]), limit=3)
    assert (found.steps, found.work) == (3, 3)


def test_requests_run_that_fit_at_the_greatest_length():
    """9 blocks of 4 tokens hold two sequences of 16."""
    engine = scheduler([])
    assert _most_requests(engine) == 2
    engine.max_model_len = 17
    assert _most_requests(engine) == 1
    engine.max_model_len = 1
    assert _most_requests(engine) == 8


def test_preempted_requests_wait_first_in_their_order():
    """vLLM puts the request that it preempts last at the head of the waiting queue."""
    loop = DecodeLoop(SimpleNamespace(rank_in_group=0, world_size=2), limit=4)
    engine = SimpleNamespace(waiting=deque(["old", "new"]))
    with loop._holding_still(engine):
        assert not engine.waiting
    assert list(engine.waiting) == ["old", "new"] and not loop.window.progress.broken
    with pytest.raises(KeyError), loop._holding_still(engine):
        engine.waiting.appendleft("second")
        engine.waiting.appendleft("first")
        raise KeyError
    assert list(engine.waiting) == ["first", "second", "old", "new"] and loop.window.progress.broken


def test_loop_made_anew_for_another_group_or_limit(own_context):
    one, other = (SimpleNamespace(rank_in_group=0, world_size=2) for _ in range(2))
    first = decode_loop.loop_of(one, 4)
    assert decode_loop.loop_of(one, 4) is first and decode_loop.going() is None
    shorter = decode_loop.loop_of(one, 1)
    assert shorter is not first and shorter.window.limit == 1
    assert decode_loop.loop_of(other, 1).group is other
    decode_loop.loop_of(other, 1).goes_on(False)
    assert decode_loop.going() is decode_loop.loop_of(other, 1)
