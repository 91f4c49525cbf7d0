"""When the engines of an instance end a rollout, and in which form they can resume an answer."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed import parallel_state
from vllm.sampling_params import RequestOutputKind, SamplingParams

from verl_patches.features import settings
from verl_patches.features.dp_sync.decode_loop import DecodeLoop
from verl_patches.features.dp_sync.sync_window import LocalState, Progress, decide, encode
from verl_patches.features.partial_rollout.engine import (
    LEFT,
    Begun,
    Ending,
    Row,
    Share,
    check_parameters,
    generate,
    parameters_left,
    resumed_prompt,
)


def agreed(endings: list[Ending], work: int = 5):
    """Return the state on which the engines agree."""
    offers = [ending.counted(LocalState(1, 1, False, False, 16, work)) for ending in endings]
    vectors = [encode(offer, Progress(), rank, len(offers)) for rank, offer in enumerate(offers)]
    return decide([max(column) for column in zip(*vectors, strict=True)], len(offers), 16)


ROWS = st.integers(1, 5).flatmap(
    lambda rows: st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=rows, max_size=rows), min_size=1, max_size=4
    )
)


@given(ROWS, st.integers(0, 20))
def test_all_engines_decide_alike_and_as_one_that_sees_all_rows_would(engines, needed):
    endings = [Ending(needed, [left for left, _ in rows], [due for _, due in rows]) for rows in engines]
    found = agreed(endings)
    every = [row for rows in engines for row in rows]
    expected = sum(not left for left, _ in every) >= needed and not any(left and due for left, due in every)
    assert {ending.decide(found) for ending in endings} == {expected}


def test_a_group_that_is_due_elsewhere_holds_the_rollout():
    mine, other = Ending(1, [0, 3], [False, False]), Ending(1, [1], [True])
    assert not mine.decide(agreed([mine, other]))
    other.unfinished[0] = 0
    assert mine.decide(agreed([mine, other]))


def test_what_has_been_decided_stays_decided():
    ending = Ending(1, [0], [False])
    assert ending.decide(agreed([ending]))
    ending.unfinished[0] = 1
    assert ending.decide(agreed([ending]))


def test_an_instance_finishes_its_part_of_the_groups():
    assert [Share(4, 16).of(rows) for rows in (16, 8, 10, 1)] == [4, 2, 3, 1]


def test_the_tokens_of_an_answer_are_part_of_its_prompt():
    assert resumed_prompt([1, 2], Begun([3, 4], [-0.5, -0.1])) == {"prompt_token_ids": [1, 2, 3, 4]}


@pytest.mark.parametrize(("done", "longest", "shortest"), [(0, 12, 5), (4, 8, 1), (7, 5, 0)])
def test_an_answer_may_generate_what_is_left_of_its_length(done, longest, shortest):
    params = SamplingParams(n=3, max_tokens=12, min_tokens=5, temperature=0.7)
    left = parameters_left(params, done)
    assert (left.n, left.max_tokens, left.min_tokens, left.temperature) == (1, longest, shortest, 0.7)
    assert left.output_kind == RequestOutputKind.FINAL_ONLY
    assert (params.n, params.max_tokens, params.min_tokens) == (3, 12, 5), "those of the batch are left alone"


PLAIN = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "prompt_logprobs": None,
    "guided_decoding": None, "logits_processors": None, "seed": None, "stop": [], "bad_words": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [("presence_penalty", 0.5), ("repetition_penalty", 1.1), ("seed", 0), ("stop", ["end"])]
)
def test_parameters_that_look_at_the_beginning_rejected(name, value):
    check_parameters(SimpleNamespace(**PLAIN))
    with pytest.raises(ValueError, match=f"the sampling parameter {name}="):
        check_parameters(SimpleNamespace(**PLAIN | {name: value}))


class Engine:
    """A stand-in for vLLM's engine on one rank: each forward adds a token to the oldest request, which ends at two."""

    dp_group = None
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    def __init__(self):
        self.asked: dict[str, dict] = {}
        self.states: dict[str, State] = {}
        self.aborted: list[str] = []
        self.output_processor = SimpleNamespace(request_states=self.states)

    def add_request(self, name, prompt, params):
        self.asked[name], self.states[name] = prompt, State()

    def abort_request(self, names):
        self.aborted += names
        self.states.clear()

    def has_unfinished_requests(self):
        return bool(self.states)

    def step(self):
        name, state = next(iter(self.states.items()))
        state.tokens.append(7)
        if len(state.tokens) < 2:
            return []
        del self.states[name]
        return [SimpleNamespace(request_id=name, outputs=[state.output("stop")])]


class State:
    def __init__(self):
        self.tokens: list[int] = []

    def output(self, reason):
        logprobs = [{token: None} for token in self.tokens]
        return SimpleNamespace(token_ids=self.tokens, logprobs=logprobs, finish_reason=reason)

    def make_request_output(self, token_ids, reason, stop_reason):
        return SimpleNamespace(outputs=[self.output(str(reason))])


def test_an_engine_alone_goes_on_with_what_is_unfinished_until_enough_groups_are_finished():
    engine = Engine()
    llm = SimpleNamespace(llm_engine=engine, request_counter=itertools.count())
    begun, finished = Begun([5], [-0.5]), Begun([8, 9], [-0.1, -0.2], finished=True)
    rows = [Row([begun, finished]), Row([Begun(), Begun()])]
    outputs = generate(llm, [[1, 2], [3]], SamplingParams(n=2, max_tokens=9), rows, Share(1, 2))
    assert engine.asked == {
        "0": {"prompt_token_ids": [1, 2, 5]}, "1": {"prompt_token_ids": [3]}, "2": {"prompt_token_ids": [3]}
    }  # fmt: skip
    assert engine.aborted == ["1", "2"], "the first group was finished, and one is enough"
    assert [list(answer.token_ids) for output in outputs for answer in output.outputs] == [[5, 7, 7], [8, 9], [], []]
    assert [answer.finish_reason for output in outputs for answer in output.outputs] == ["stop", "stop", LEFT, LEFT]


class SharedEngine(Engine):
    """One of several engines that form one model and agree on an end; its forwards may fail."""

    dp_group = object()

    def __init__(self, loop, fails):
        super().__init__()
        self.loop, self.fails, self.ends = loop, fails, []

    def step(self):
        self.ends.append(self.loop.early_end)
        if self.fails:
            raise RuntimeError("the device is lost")
        return super().step()


@pytest.mark.parametrize("fails", [False, True])
def test_a_rollouts_end_is_not_that_of_the_next_one(monkeypatch, own_context, fails):
    """verl's validation uses the same engines with vLLM's own method, and must get all of its answers."""
    loop = DecodeLoop(SimpleNamespace(rank_in_group=0, world_size=2), settings.OverlaySettings().dp_sync.lease_steps)
    own_context.keep(loop)
    monkeypatch.setattr(parallel_state, "get_dp_group", lambda: loop.group)
    monkeypatch.setattr(settings, "_current", settings.OverlaySettings())
    engine = SharedEngine(loop, fails)
    llm = SimpleNamespace(llm_engine=engine, request_counter=itertools.count())
    with pytest.raises(RuntimeError, match="is lost") if fails else nullcontext():
        generate(llm, [[1, 2]], SamplingParams(max_tokens=9), [Row([Begun()])], Share(1, 1))
    assert all(isinstance(end, Ending) for end in engine.ends) and engine.ends
    assert loop.early_end is None
