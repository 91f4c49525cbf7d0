"""Each answer has its own seed, and answers come in the order of their prompts regardless of their random names."""

import asyncio
import copy
import itertools
import random
from types import SimpleNamespace

import pytest
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, agent_loop_tq
from verl.trainer.ppo.v1 import replay_buffer as upstream
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

from verl_plugin.resume import agent_loops, replay_buffer
from verl_plugin.resume.agent_loops import (
    _TURNS,
    SeededAgentLoopManager,
    SeededAgentLoopWorker,
    SeededTurns,
    seed_of,
    seed_of_turn,
)
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
    """Generate two answers at once with alternating turns; the loop gets a copy of the client, as from Hydra."""
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


def buffer_of(monkeypatch, items, sampler_kwargs) -> OrderedReplayBuffer:
    """Make a replay buffer over a queue that has these names and tags."""
    queue = SimpleNamespace(kv_list=lambda *_: {"train": dict(items)}, kv_clear=lambda **_: None)
    monkeypatch.setattr(upstream, "tq", queue)
    monkeypatch.setattr(replay_buffer, "tq", queue)
    return OrderedReplayBuffer(
        trainer_mode="sync", trainer_config={}, max_off_policy_threshold=None, max_off_policy_strategy="drop",
        sampler_kwargs=sampler_kwargs,
    )  # fmt: skip


@pytest.fixture(params=range(3))
def batch(request, monkeypatch) -> KVBatchMeta:
    """A batch of prompts with random names, whose answers arrived in random order."""
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
    buffer = buffer_of(monkeypatch, items, {"poll_interval": 0.01})
    assert buffer.poll_interval == 0.01
    return buffer.sample(3, "train", PROMPTS)[0]


def test_answers_come_in_the_order_of_their_prompts(batch):
    expected = [(place, number) for place in range(PROMPTS) for number in range(ANSWERS)]
    assert [(tag["place"], tag["number"]) for tag in batch.tags] == expected


@pytest.mark.parametrize("asked", [1, 5, 9, 12])
@pytest.mark.parametrize("seed", range(3))
def test_prompts_come_by_step_and_in_the_order_of_each(monkeypatch, asked, seed):
    """Finish more prompts than are asked for, from several steps, and compare with a sorted list."""
    chosen = random.Random(seed)
    expected = [(step, place) for step in (2, 3, 10) for place in range(4)]
    names = {f"{chosen.getrandbits(64):x}": each for each in expected}
    items = [
        (name, {"is_prompt": True, "status": "finished", "global_steps": step, ORDER: place})
        for name, (step, place) in names.items()
    ]
    items += [(f"{name}_{number}_0", {"of": each}) for name, each in names.items() for number in range(2)]
    chosen.shuffle(items)
    buffer = buffer_of(monkeypatch, items, None)
    assert buffer.poll_interval == 2.0
    found, _ = buffer.sample(10, "train", asked)
    assert [tag["of"] for tag in found.tags] == [each for each in expected[:asked] for _ in range(2)]


ANSWERED = 3
CONFIG = SimpleNamespace(
    actor_rollout_ref=SimpleNamespace(
        rollout=SimpleNamespace(seed=7, n=ANSWERED, val_kwargs=SimpleNamespace(n=ANSWERED + 1))
    )
)


@pytest.mark.parametrize("validate", [False, True])
def test_worker_samples_each_answer_by_step_place_and_number(monkeypatch, validate):
    """Run verl's own code from a prompt to its answers, without generating them."""
    asked: dict[str, list[int]] = {}

    async def answer(worker, sampling_params, trajectory, *, uid, session_id, **named):
        assert ORDER not in named and sampling_params["temperature"] == 0.5
        asked.setdefault(uid, []).append(sampling_params["seed"])
        assert next(_TURNS.get()) == 0, "each answer numbers its own turns"

    async def put(**_):
        pass

    # Ray's subclass of verl's worker adds methods of its own.
    monkeypatch.setattr(AgentLoopWorkerTQ.__ray_metadata__.modified_class, "_run_agent_loop", answer)
    monkeypatch.setattr(agent_loop_tq, "tq", SimpleNamespace(async_kv_put=put))
    worker = object.__new__(SeededAgentLoopWorker)
    worker.config = CONFIG

    async def both():
        for place, uid in ((5, "a"), (0, "b")):
            prompt, trajectory = {"uid": uid, ORDER: str(place)}, {"step": "4", "validate": validate}
            await worker._run_prompt(prompt, {"temperature": 0.5}, trajectory)

    asyncio.run(both())
    numbers = range(ANSWERED + validate)
    assert asked == {
        uid: [seed_of(7, 4, place, number, validate) for number in numbers] for place, uid in ((5, "a"), (0, "b"))
    }


@pytest.mark.parametrize(
    ("marks", "partition"), [({}, "train"), ({"validate": True}, "val"), ({"validate": False}, "train")]
)
def test_manager_numbers_prompts_in_their_batch_and_their_tags(monkeypatch, marks, partition):
    put, passed = [], []
    monkeypatch.setattr(agent_loops, "tq", SimpleNamespace(kv_batch_put=lambda **named: put.append(named)))
    monkeypatch.setattr(AgentLoopManagerTQ, "generate_sequences", lambda self, prompts: passed.append(prompts))
    prompts = tu.get_tensordict({"uid": ["c", "a", "b"]}, marks)
    object.__new__(SeededAgentLoopManager).generate_sequences(prompts)
    assert [list(each[ORDER]) for each in passed] == [[0, 1, 2]]
    assert put == [{"keys": ["c", "a", "b"], "partition_id": partition, "tags": [{ORDER: place} for place in range(3)]}]
