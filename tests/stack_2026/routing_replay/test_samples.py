"""Experts that come with samples: their size in bytes, the rows they are known for, and the ones that are rejected."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_npu  # noqa: F401
from transfer_queue.utils.serial_utils import decode, encode
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.megatron.router_replay_utils import build_r3_replay_mask
from verl.utils.tensordict_utils import get_tensordict, list_of_dict_to_tensordict

from verl_plugin.routing_replay.agent_loops import compact
from verl_plugin.routing_replay.fsdp2_engine import RoutedFSDP2
from verl_plugin.routing_replay.given import GivenExperts, Rows, Tally, metrics_of, one_hot
from verl_plugin.routing_replay.samples import checked, known_rows

MODEL = SimpleNamespace(num_hidden_layers=3, num_experts_per_tok=2, num_experts=8)


def nested(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


TOKENS = nested([torch.arange(5), torch.arange(3), torch.arange(4)])
ANSWERS = nested([torch.tensor([1, 1]), torch.tensor([0]), torch.tensor([1, 0, 1])])


def test_known_rows_are_those_that_verl_replays():
    found, expected = known_rows(TOKENS, ANSWERS), build_r3_replay_mask(TOKENS, ANSWERS)
    assert torch.equal(found.values(), expected.values()) and torch.equal(found.offsets(), expected.offsets())
    assert found.values().tolist() == [True] * 4 + [False] * 4 + [True] * 3 + [False]


def experts(lengths: tuple[int, ...] = (5, 3, 4), layers: int = 3, highest: int = 7) -> torch.Tensor:
    parts = [torch.zeros(length, layers, 2, dtype=torch.uint8) for length in lengths]
    parts[0][0, 0, 0] = highest
    return nested(parts)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (experts(lengths=(5, 3, 3)), r"samples of \[5, 3, 4\] tokens came with the experts of \[5, 3, 3\] tokens"),
        (experts(layers=2), r"experts of shape \(2, 2\), but the model has \(3, 2\)"),
        (experts(highest=8), "a token came with expert 8, but the model has 8"),
        (experts(highest=0), "the rollout recorded no experts"),
    ],
)
def test_experts_of_other_samples_or_models_rejected(given, says):
    with pytest.raises(ValueError, match=says):
        checked(given, TOKENS, known_rows(TOKENS, ANSWERS), MODEL)


def test_experts_of_the_samples_pass():
    checked(experts(), TOKENS, known_rows(TOKENS, ANSWERS), MODEL)


@pytest.mark.parametrize(("dtype", "kept"), [(np.uint8, torch.uint8), (np.uint16, torch.int16)])
def test_samples_carry_experts_as_narrow_as_vllm(dtype, kept):
    """Use an output as verl's agent loop makes it: vLLM returns no row for the last token, and verl adds one."""
    routed = np.arange(4 * 2 * 2).astype(dtype).reshape(4, 2, 2)
    plain = AgentLoopOutput(
        prompt_ids=[1, 2, 3], response_ids=[4, 5], response_mask=[1, 1], routed_experts=routed, num_turns=2,
        metrics=AgentLoopMetrics(), extra_fields={"turn_scores": []},
    )  # fmt: skip
    upstream, found = plain.as_dict(), compact(plain).as_dict()
    assert upstream["routed_experts"].dtype == torch.int16 and found["routed_experts"].dtype == kept
    assert torch.equal(found.pop("routed_experts").to(torch.int16), upstream.pop("routed_experts"))
    assert {name: str(value) for name, value in found.items()} == {n: str(value) for n, value in upstream.items()}


def test_transfer_queue_carries_half_the_bytes_of_verl():
    """Send a batch of samples of unequal lengths, put as verl does."""
    sent = {}
    for dtype in (torch.uint8, torch.int16):
        parts = [torch.full((length, 4, 8), 200, dtype=dtype) for length in (50, 70)]
        frames = encode(list_of_dict_to_tensordict([{"routed_experts": part} for part in parts]))
        arrived = decode(frames)["routed_experts"]
        assert arrived.dtype == dtype and all(map(torch.equal, arrived.unbind(), parts))
        sent[dtype] = sum(memoryview(frame).nbytes for frame in frames)
    assert sent[torch.int16] - sent[torch.uint8] == (50 + 70) * 4 * 8


def test_output_without_experts_unchanged():
    plain = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics())
    assert "routed_experts" not in compact([plain])[0].as_dict()


def rows(first: int) -> Rows:
    """Make two rows, each with experts `first` and `first + 1` in one layer; the second is padding."""
    return Rows(torch.tensor([[[first, first + 1]], [[first, first + 1]]]), torch.tensor([True, False]))


def chosen_by(given: GivenExperts) -> list[list[int]]:
    """Return the experts used by a router of 8 experts that prefers the first ones."""
    scores = torch.arange(8.0, 0.0, -1.0).repeat(2, 1)
    values, numbers = given.get_replay_topk(
        scores, 2, default_compute_topk=lambda scores, topk, num_groups=None, group_topk=None: scores.topk(topk)
    )
    assert torch.equal(values, scores.gather(1, numbers))
    return numbers.tolist()


NATIVE = [0, 1]


def test_recomputation_follows_the_order_of_micro_batches():
    """Start two micro batches before the backward pass of the first, as pipeline stages do."""
    given = GivenExperts(0, replays=True, in_order=True)
    for first in (2, 4):
        given.begin(rows(first), has_backward=True)
        assert chosen_by(given) == [[first, first + 1], NATIVE]
        given.end()
    assert [chosen_by(given) for _ in range(3)] == [[[2, 3], NATIVE], [[4, 5], NATIVE], [NATIVE, NATIVE]]
    given.begin(rows(2), has_backward=True)
    given.release()
    assert chosen_by(given) == [NATIVE, NATIVE]


def test_recomputation_may_ask_twice_without_stages():
    given = GivenExperts(0, replays=True, in_order=False)
    for first in (2, 4):
        given.begin(rows(first), has_backward=True)
        given.end()
    assert [chosen_by(given) for _ in range(2)] == [[[4, 5], NATIVE]] * 2


def test_forward_without_backward_keeps_nothing():
    given = GivenExperts(0, replays=True, in_order=True)
    given.begin(rows(2), has_backward=False)
    given.end()
    assert chosen_by(given) == [NATIVE, NATIVE]


def test_rows_of_another_micro_batch_rejected():
    given = GivenExperts(3, replays=True, in_order=True)
    given.begin(Rows(torch.zeros(3, 4, 2, dtype=torch.int64), torch.ones(3, dtype=torch.bool)), has_backward=False)
    with pytest.raises(ValueError, match=r"the router of layer 3 has \(2, 2\) choices, but the rollout gave \(3, 2\)"):
        chosen_by(given)


def test_tally_counts_known_rows_until_the_first_update():
    tally = Tally()
    given = GivenExperts(0, replays=False, in_order=True, tally=tally)
    used = torch.zeros(2, 8, dtype=torch.bool)
    used[:, :2] = True
    for first in (0, 4):
        given.begin(rows(first), has_backward=True)
        chosen_by(given)
        given.count(used)
        given.end()
    given.count(used)  # recomputation
    assert tally.take("cpu").tolist() == [2, 1, 1]
    tally.open = False
    given.begin(rows(4), has_backward=True)
    given.count(used)
    assert tally.take("cpu").tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_tally_is_a_naive_count_over_layers_and_micro_batches(seed):
    """Draw random choices for every router, and include rows that the rollout has not computed."""
    drawn = torch.Generator().manual_seed(seed)
    tally, counts, layers, experts = Tally(), [0, 0, 0], 3, 5
    routers = [GivenExperts(layer, replays=bool(seed % 2), in_order=True, tally=tally) for layer in range(layers)]

    def choices() -> torch.Tensor:
        return torch.stack([torch.randperm(experts, generator=drawn)[:2] for _ in range(7)])

    for _ in range(2):
        given = torch.stack([choices() for _ in range(layers)], dim=1)
        known = torch.rand(7, generator=drawn) < 0.6
        for router in routers:
            router.begin(Rows(given, known), has_backward=True)
        for layer, router in enumerate(routers):
            native = choices()
            used = router.choose(native, experts)
            router.count(one_hot(used, experts))
            for row in range(7):
                wanted, preferred = set(given[row, layer].tolist()), set(native[row].tolist())
                assert set(used[row].tolist()) == (wanted if seed % 2 and known[row] else preferred)
                differs = set(used[row].tolist()) != wanted, preferred != wanted
                counts = [
                    count + int(known[row] and more) for count, more in zip(counts, (True, *differs), strict=True)
                ]
        for router in routers:
            router.end()
    assert tally.take("cpu").tolist() == counts and tally.take("cpu").tolist() == [0, 0, 0]
    compared, differ, replaced = counts
    assert list(metrics_of(counts).values()) == [compared, differ / compared, replaced / compared]
    assert metrics_of([0, 0, 0]) == {}


@pytest.mark.parametrize("packed", [True, False])
def test_rows_of_fsdp2_lie_as_tokens_do(packed):
    """Use three samples of unequal lengths, with padding behind all of them or behind each."""
    lengths, padding = (5, 3, 4), 6
    parts = [torch.arange(length * 6, dtype=torch.uint8).view(length, 3, 2) + 20 * place
             for place, length in enumerate(lengths)]  # fmt: skip
    batch = get_tensordict(
        {"routed_experts": nested(parts), "input_ids": TOKENS, "response_mask": ANSWERS},
        {"use_remove_padding": packed},
    )
    engine = object.__new__(RoutedFSDP2)
    engine._get_packed_pad_size = lambda length: padding if length == sum(lengths) else -1
    found = engine._rows(batch)
    known = known_rows(TOKENS, ANSWERS).unbind()
    rows, marks = [], []
    for part, mark in zip(parts, known, strict=True):
        behind = 0 if packed else max(lengths) - len(part)
        rows += [*part.long().tolist(), *[[[0, 0]] * 3] * behind]
        marks += [*mark.tolist(), *[False] * behind]
    if packed:
        rows, marks = rows + [[[0, 0]] * 3] * padding, marks + [False] * padding
    assert found.experts.tolist() == rows and found.known.tolist() == marks
    assert found.of_layer(1)[0].tolist() == [row[1] for row in rows]
