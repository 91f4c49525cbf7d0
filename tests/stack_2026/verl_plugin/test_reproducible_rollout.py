"""Answers have seeds of their own, and come in the order of their prompts whatever their random names are."""

import asyncio
import copy
import itertools
import random
from types import SimpleNamespace

import pytest
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import replay_buffer as upstream

from verl_plugin.resume import replay_buffer
from verl_plugin.resume.agent_loops import _TURNS, SeededTurns, seed_of, seed_of_turn
from verl_plugin.resume.replay_buffer import ORDER, OrderedReplayBuffer

PROMPTS, ANSWERS = 12, 11


def test_each_answer_has_a_seed_of_its_own():
    asked = [
        (run, step, order, session, validate)
        for run in (1, 2) for step in (1, 2) for order in range(4) for session in range(4) for validate in (False, True)
    ]  # fmt: skip
    seeds = {seed_of(*each) for each in asked}
    assert len(seeds) == len(asked) and all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, 2, 3, 4, False) == 2361138455623693186


def test_each_turn_of_an_answer_draws_with_its_own_seed():
    """Of two answers at once, whose turns alternate; the loop has a copy of the client, as Hydra hands it."""
    asked: dict[int, list[int]] = {1: [], 2: []}

    class Client:
        other = "reached"

        async def generate(self, answer, *, sampling_params):
            asked[answer].append(sampling_params["seed"])
            await asyncio.sleep(0)

    async def answered(client, answer):
        _TURNS.set(itertools.count())
        given = {"seed": answer}
        for _ in range(3):
            await client.generate(answer, sampling_params=given)
        assert given == {"seed": answer}

    async def both():
        client = copy.deepcopy(SeededTurns(Client()))
        assert client.other == "reached"
        await asyncio.gather(answered(client, 1), answered(client, 2))

    asyncio.run(both())
    assert asked == {answer: [answer, seed_of_turn(answer, 1), seed_of_turn(answer, 2)] for answer in (1, 2)}
    assert len({seed for seeds in asked.values() for seed in seeds}) == 6


@pytest.fixture(params=range(3))
def batch(request, monkeypatch) -> KVBatchMeta:
    """Of prompts with random names, whose answers arrived in a random order."""
    chosen = random.Random(request.param)
    names = [f"{chosen.getrandbits(64):x}" for _ in range(PROMPTS)]
    prompts = {
        name: {"is_prompt": True, "status": "finished", "global_steps": 3, ORDER: place}
        for place, name in enumerate(names)
    }
    answers = {f"{name}_{number}_0": {"place": place, "number": number}
               for place, name in enumerate(names) for number in range(ANSWERS)}  # fmt: skip
    items = list((prompts | answers).items())
    chosen.shuffle(items)
    queue = SimpleNamespace(kv_list=lambda *_: {"train": dict(items)}, kv_clear=lambda **_: None)
    monkeypatch.setattr(upstream, "tq", queue)
    monkeypatch.setattr(replay_buffer, "tq", queue)
    buffer = OrderedReplayBuffer(
        trainer_mode="sync", trainer_config={}, max_off_policy_threshold=None, max_off_policy_strategy="drop",
        sampler_kwargs={"poll_interval": 0.01},
    )  # fmt: skip
    assert buffer.poll_interval == 0.01
    return buffer.sample(3, "train", PROMPTS)[0]


def test_answers_come_in_the_order_of_their_prompts(batch):
    expected = [(place, number) for place in range(PROMPTS) for number in range(ANSWERS)]
    assert [(tag["place"], tag["number"]) for tag in batch.tags] == expected
