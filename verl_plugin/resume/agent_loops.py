"""Samples each answer with random numbers of its own; set by `rollout.agent.agent_loop_manager_class`.

vLLM draws all answers in flight from one stream of random numbers, so a token depends on which requests arrived before.
With a seed of its own, an answer depends only on its step, its prompt's place and its number, so a resumed run samples
the answers that it would have sampled without the interruption. Each turn of an answer has its own seed: with one seed
for all of them the second turn would draw its tokens with the random numbers of the first.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import ray
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

from verl_plugin.resume.replay_buffer import ORDER


def seed_of(run_seed: int, step: int, order: int, session: int, validate: bool) -> int:
    """Return the seed of an answer.

    Args:
        run_seed: `actor_rollout_ref.rollout.seed`.
        step: in which it is sampled.
        order: its prompt's place in the step's batch.
        session: its number among the answers of the prompt.
        validate: whether it belongs to a validation.
    """
    digest = hashlib.sha256(f"{run_seed} {step} {order} {session} {int(validate)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # not negative in 64 bits


def seed_of_turn(seed: int, turn: int) -> int:
    """Return the seed of one turn of an answer; the first turn has the answer's."""
    if not turn:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {turn}".encode()).digest()[:8], "little") >> 1


_TURNS: ContextVar[Iterator[int]] = ContextVar("turns")
"""Numbers the turns of an answer, which verl's loop runs in a task of its own."""


class SeededTurns:
    """Client of the vLLM servers that gives each turn its seed.

    Args:
        client: verl's, which sends the requests.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    async def generate(self, *arguments: Any, sampling_params: dict[str, Any], **named: Any) -> Any:
        """As upstream, with the seed of the turn."""
        own = {**sampling_params, "seed": seed_of_turn(sampling_params["seed"], next(_TURNS.get()))}
        return await self._client.generate(*arguments, sampling_params=own, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Hydra copies it, and a copy has no client at first
            raise AttributeError(name)
        return getattr(self._client, name)


class SeededAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker, which gives vLLM a seed with every request."""

    llm_client: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.llm_client = SeededTurns(self.llm_client)

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        order = int(prompt.pop(ORDER))
        await super()._run_prompt(prompt, sampling_params, trajectory={**trajectory, ORDER: order}, trace=trace)

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, session_id: int, **named: Any
    ) -> Any:
        seed = seed_of(
            self.config.actor_rollout_ref.rollout.seed,
            int(trajectory["step"]),
            trajectory[ORDER],
            session_id,
            trajectory["validate"],
        )
        own = {**sampling_params, "seed": seed}
        _TURNS.set(itertools.count())
        return await super()._run_agent_loop(own, trajectory=trajectory, session_id=session_id, **named)


class SeededAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, which numbers the prompts of a batch."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.agent_loop_workers_class = ray.remote(SeededAgentLoopWorker)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """As upstream."""
        places = list(range(len(prompts)))
        partition = "val" if "validate" in prompts and prompts["validate"] else "train"
        tq.kv_batch_put(keys=list(prompts["uid"]), partition_id=partition, tags=[{ORDER: place} for place in places])
        tu.assign_non_tensor_stack(prompts, ORDER, places)
        super().generate_sequences(prompts)
