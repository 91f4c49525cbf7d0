"""The token for which each row of a rollout's forward is recorded, under all of vLLM's ways to fill a batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from verl_patches.features.expert_sets.keys import prefix_keys
from verl_patches.features.expert_sets.rollout import RunnerChoices

SLOTS, LONGEST = 4, 24


class Keys:
    """A stand-in for the recorder that keeps the keys of every forward. It draws no token, so no hook is installed."""

    def __init__(self):
        self.of_forwards = []

    def begin(self, keys, drawn):
        self.of_forwards.append(keys.tolist())
        return False

    def end(self):
        pass


class Decoder(nn.Module):
    """The part of a model that the runner reads: two layers, of which one or none has a gate."""

    def __init__(self, gates: bool):
        super().__init__()
        layers = [
            SimpleNamespace(mlp=SimpleNamespace(gate=None)),
            SimpleNamespace(mlp=SimpleNamespace(gate=gates or None)),
        ]
        self.model = SimpleNamespace(layers=layers)

    def forward(self):
        return None


class Runner:
    """vLLM-Ascend's model runner with a batch of at most SLOTS requests; `tokens` and `computed` are by name."""

    def __init__(self, gates=True):
        self.tokens, self.computed, self.recorder = {}, {}, Keys()
        self.torchair_graph_enabled = False
        self.decoder = Decoder(gates)
        self.watched = RunnerChoices(self, self.recorder, 1e-30).install()

    def get_model(self):
        return self.decoder

    def _dummy_run(self, tokens):
        self.decoder()

    def forward(self, scheduled):
        """Run the given numbers of tokens, in this order. Return the keys computed from each request's full tokens."""
        names = list(scheduled)
        ids, edges = np.zeros((SLOTS, LONGEST), np.int32), [0]
        for row, name in enumerate(names):
            ids[row, : len(self.tokens[name])] = self.tokens[name]
            edges.append(edges[-1] + scheduled[name])
        unused = SLOTS - len(names)
        self.input_batch = SimpleNamespace(
            req_ids=names + [None] * unused, num_reqs=len(names), token_ids_cpu=ids,
            num_computed_tokens_cpu=np.array([self.computed[name] for name in names] + [0] * unused, np.int32),
        )  # fmt: skip
        self.query_start_loc_cpu = torch.tensor(edges + [edges[-1]] * unused, dtype=torch.int32)
        self.decoder()
        expected = []
        for name, count in scheduled.items():
            first = self.computed[name]
            expected += prefix_keys(np.array(self.tokens[name]))[first : first + count].tolist()
            self.computed[name] += count
        return expected

    def begin(self, name, prompt, cached=0):
        """Start a request with `cached` tokens in the prefix cache, or restart a preempted one with all its tokens."""
        self.tokens[name], self.computed[name] = list(prompt), cached


def judge(runner, expected):
    assert runner.recorder.of_forwards == expected


def test_parts_and_cached_prefixes_have_the_keys_of_a_whole():
    runner = Runner()
    runner.begin("1", range(10, 19))
    runner.begin("2", [*range(10, 16), 3], cached=6)
    expected = [runner.forward({"1": 4, "2": 1}), runner.forward({"1": 5})]
    runner.tokens["1"].append(77)
    judge(runner, [*expected, runner.forward({"1": 1})])


@pytest.mark.parametrize("cached", [0, 3])
@pytest.mark.parametrize("others", [True, False], ids=["beside another", "alone"])
def test_a_preempted_request_is_named_from_its_beginning(cached, others):
    """It loses its blocks except those in the prefix cache, and is computed again under the same name."""
    runner = Runner()
    runner.begin("1", range(30, 38))
    runner.begin("2", range(50, 58))
    expected = [runner.forward({"2": 8, "1": 8} if others else {"1": 8})]
    for name in ("1", "2"):
        runner.tokens[name].append(5)
    if others:
        expected.append(runner.forward({"2": 1, "1": 1}))
        runner.tokens["2"].append(6)
    runner.begin("1", runner.tokens["1"], cached)
    left = len(runner.tokens["1"]) - cached
    expected.append(runner.forward({"1": left, "2": 1} if others else {"1": left}))
    judge(runner, expected)


def test_forwards_without_a_request_name_nothing():
    runner = Runner()
    runner.begin("1", range(5))
    expected = [runner.forward({"1": 3})]
    runner._dummy_run(1)
    judge(runner, [*expected, runner.forward({"1": 2})])


@pytest.mark.parametrize("gates", [True, False])
def test_a_model_without_routers_is_not_watched(gates):
    runner = Runner(gates)
    assert runner.watched == gates
    runner.begin("1", range(5))
    runner.forward({"1": 5})
    assert len(runner.recorder.of_forwards) == gates


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_schedule_names_rows_by_their_prefixes(data):
    """Requests arrive, run in chunks, are sampled for, are preempted and leave, in batches of any order."""
    runner, expected, running = Runner(), [], {}
    for number in range(data.draw(st.integers(1, 12))):
        if len(running) < SLOTS and (not running or data.draw(st.booleans())):
            prompt = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
            running[str(number)] = True
            runner.begin(str(number), prompt, data.draw(st.integers(0, len(prompt) - 1)))
        for name in data.draw(st.lists(st.sampled_from(sorted(running)), unique=True)):
            if runner.computed[name] and data.draw(st.booleans()):
                runner.begin(name, runner.tokens[name], data.draw(st.integers(0, runner.computed[name] - 1)))
        scheduled = {}
        for name in data.draw(st.permutations(sorted(running))):
            left = len(runner.tokens[name]) - runner.computed[name]
            scheduled[name] = data.draw(st.integers(1, left))
        expected.append(runner.forward(scheduled))
        for name in list(running):
            if runner.computed[name] == len(runner.tokens[name]):
                runner.tokens[name].append(data.draw(st.integers(0, 3)))
            if len(runner.tokens[name]) == LONGEST or data.draw(st.integers(0, 5)) == 0:
                del running[name]
    judge(runner, expected)
