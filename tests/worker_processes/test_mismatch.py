"""The same tokens through rollout and training of a tiny DeepSeek-V3: they agree, and six planted faults are found."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from post_training.mismatch import points
from post_training.mismatch.comparison import compare
from post_training.mismatch.dumps import Dump, Header, TokenSequence, merged
from post_training.mismatch.points import of_layer
from post_training.mismatch.report import sentence
from tests.worker_processes import jobs, mismatch_jobs
from tests.worker_processes.conftest import PROMPTS

pytestmark = pytest.mark.slow
LAYERS, DENSE, EXPERTS_OF_A_RANK = 3, 1, 64
# More sequences than the ranks divide evenly, with different lengths, and two of them equal.
_DRAW = torch.Generator().manual_seed(0)
_RESPONSES = [tuple(torch.randint(5, 45, (3 + index % 6,), generator=_DRAW).tolist()) for index in range(6)]
SEQUENCES = [TokenSequence(tuple(prompt), response) for prompt, response in zip(PROMPTS, _RESPONSES, strict=False)]
SEQUENCES.append(SEQUENCES[2])
LONG = pytest.mark.exhaustive("a generation for each fault; one of them is planted in every run")


def captured(processes, fault=None, **more):
    """Return the dumps of rollout and training."""
    found = processes.run(mismatch_jobs.capture, SEQUENCES, fault, **more)
    dumps = []
    for index, side in enumerate(("rollout", "training")):
        whole, replicas = merged(parts[index] for parts in found)
        header = Header(side, "float32", "DeepseekV3ForCausalLM", LAYERS, 0.8, replicas)
        dumps.append(Dump(header, tuple(SEQUENCES), whole))
    return dumps


@pytest.fixture(scope="module")
def without_fault(processes):
    processes.run(jobs.recall)
    return captured(processes)


def test_in_float32_they_agree_at_every_point_and_token(without_fault):
    found = compare(*without_fault)
    assert found.first is None, sentence(found)
    assert not found.one_sided and found.swapped == 0
    responses = sum(len(each.response) for each in SEQUENCES)
    # Nobody reads the last token of the longest response after it is generated.
    tokens = sum(len(each.tokens) for each in SEQUENCES) - 1
    for each in found.results:
        assert each.judged == (responses if each.part in (points.LOGITS, points.LOG_PROBS) else tokens), each.point
    with_experts = {each.layer for each in found.results if each.part == points.EXPERTS}
    assert with_experts == set(range(DENSE, LAYERS))
    assert len(found.results) == 4 + LAYERS * len(points.OF_A_LAYER) - 2 * DENSE
    # These are two separate computations, not one that was recorded twice.
    assert found.result(of_layer(LAYERS - 1, points.OUTPUT)).worst > 0


@pytest.mark.parametrize(
    ("fault", "first", "word"),
    [
        ("one TP shard", of_layer(1, points.ATTENTION), "tensor-parallel shard"),
        pytest.param("stale layer", of_layer(1, points.ATTENTION_NORM), "weights", marks=LONG),
        pytest.param("rope scaling", of_layer(0, points.ATTENTION), "rotary", marks=LONG),
        pytest.param("norm epsilon", of_layer(2, points.ATTENTION_NORM), "epsilon", marks=LONG),
        pytest.param("temperature", points.LOG_PROBS, "temperature", marks=LONG),
    ],
)
def test_a_planted_fault_is_named_with_its_layer(workers, fault, first, word):
    found = compare(*captured(workers, fault))
    assert found.first is not None and found.first.point == first, sentence(found)
    assert word in sentence(found)


@LONG
def test_swapped_experts_are_named_with_their_layer(workers, without_fault):
    chosen = Counter(without_fault[1].points[of_layer(2, points.EXPERTS)].values.flatten().tolist())
    used = max(range(EXPERTS_OF_A_RANK - 1), key=lambda expert: chosen[expert])
    assert chosen[used]
    found = compare(*captured(workers, "swapped experts", experts=(used, used + 1)))
    assert found.first is not None and found.first.point == of_layer(2, points.MLP), sentence(found)
    assert used in found.first.experts and set(found.first.experts) <= {used, used + 1}
    assert "these experts" in sentence(found)
