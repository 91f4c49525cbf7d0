"""Which rows of a model runner's forwards are recorded, request by request, and which forwards are skipped."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from post_training.mismatch.recording import NO_TOKEN
from verl_patches.features.expert_sets.keys import prefix_keys
from verl_patches.features.expert_sets.records import ChoiceRecorder
from verl_patches.features.expert_sets.rollout import RunnerChoices


class Runner:
    """The batch state of vLLM-Ascend's runner: each request's tokens, how many are computed, and the row boundaries."""

    def __init__(self, graphs: bool = False) -> None:
        self.model = nn.Identity()
        self.model.model = SimpleNamespace(layers=[SimpleNamespace(mlp=SimpleNamespace(gate=nn.Identity()))])
        self.torchair_graph_enabled = graphs

    def get_model(self) -> nn.Module:
        return self.model

    def _dummy_run(self) -> None:
        self.model(torch.zeros(1))

    def forward(self, batch: dict[str, tuple[list[int], int, int]], prefill: bool = True) -> None:
        """`batch`: by request, all known tokens, how many are computed, and how many this forward computes."""
        tokens = np.zeros((len(batch), 64), np.int64)
        for row, (known, _, _) in enumerate(batch.values()):
            tokens[row, : len(known)] = known
        self.input_batch = SimpleNamespace(
            req_ids=[*batch, None],
            num_reqs=len(batch),
            token_ids_cpu=tokens,
            num_computed_tokens_cpu=np.array([computed for _, computed, _ in batch.values()]),
        )
        rows = [count for _, _, count in batch.values()]
        self.query_start_loc_cpu = torch.tensor([0, *np.cumsum(rows)])
        context = SimpleNamespace(with_prefill=prefill)
        with mock.patch("vllm.forward_context._forward_context", context):
            self.model(torch.zeros(sum(rows)))


@pytest.fixture
def seen(monkeypatch):
    """Return the keys of each recorded forward."""
    found: list[list[int]] = []

    class Watched(ChoiceRecorder):
        def end(self) -> None:
            if self.rows is not None:
                assert (self.rows != NO_TOKEN).all()
                found.append(self._keys.tolist())
            super().end()

    monkeypatch.setattr(
        "verl_patches.features.expert_sets.rollout.recorded_rollout_choices", lambda *_: mock.MagicMock()
    )
    found.append(Watched())
    return found


def started(seen, **options) -> Runner:
    runner = Runner(**options)
    assert RunnerChoices(runner, seen.pop(), share=1.0).install()
    return runner


def keys(tokens: list[int], first: int, last: int) -> list[int]:
    return prefix_keys(np.array(tokens))[first:last].tolist()


def test_chunked_prompts_and_decode_steps_have_their_keys(seen):
    """A prompt in two chunks runs beside one that decodes; a third finds its first tokens in the prefix cache."""
    runner, long, short, cached = started(seen), [*range(10, 17)], [20, 21], [10, 11, 30]
    runner.forward({"long": (long, 0, 4), "short": (short, 0, 2)})
    runner.forward({"short": ([*short, 22], 2, 1), "long": (long, 4, 3), "cached": (cached, 2, 1)})
    assert seen == [
        keys(long, 0, 4) + keys(short, 0, 2),
        keys([*short, 22], 2, 3) + keys(long, 4, 7) + keys(cached, 2, 3),
    ]


def test_preempted_request_begins_again(seen):
    runner, tokens = started(seen), [5, 6, 7]
    runner.forward({"one": (tokens, 0, 3)})
    runner.forward({"other": ([9], 0, 1)})
    runner.forward({"one": ([*tokens, 8], 0, 4)})
    assert seen[-1] == keys([5, 6, 7, 8], 0, 4)


def test_graphs_and_dummy_runs_are_left_alone(seen):
    runner = started(seen, graphs=True)
    runner.forward({"one": ([5, 6], 0, 2)})
    runner.forward({"one": ([5, 6, 7], 2, 1)}, prefill=False)
    runner._dummy_run()
    assert seen == [keys([5, 6], 0, 2)]


def test_dense_model_is_not_watched():
    runner = Runner()
    runner.model.model.layers[0].mlp = SimpleNamespace()
    assert not RunnerChoices(runner, ChoiceRecorder(), share=1.0).install()
