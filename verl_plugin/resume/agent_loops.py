"""Samples each answer with random numbers of its own; set by `rollout.agent.agent_loop_manager_class`.

vLLM draws all answers in flight from one stream of random numbers, so that a token depends on which requests arrived
before. With a seed of its own, an answer depends on nothing but its step, its prompt's place and its number, and so a
run that is resumed samples what it would have sampled.
"""

from __future__ import annotations

import hashlib
from typing import Any

import ray
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

from verl_plugin.resume.replay_buffer import ORDER


def seed_of(run_seed: int, step: int, order: int, session: int, validate: bool) -> int:
    """The seed of an answer.

    Args:
        run_seed: `actor_rollout_ref.rollout.seed`.
        step: in which it is sampled.
        order: its prompt's place in the step's batch.
        session: its number among the answers of the prompt.
        validate: whether it is of a validation.
    """
    digest = hashlib.sha256(f"{run_seed} {step} {order} {session} {int(validate)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # not negative in 64 bits


class SeededAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker, which gives vLLM a seed with every request."""

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
