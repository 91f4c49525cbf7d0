"""Run two steps of an FSDP job on made-up answers, without Ray and without an engine; see test_fsdp.py.

request.json holds the configuration and its overrides. The peak of every phase is in the run's own files.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl import DataProto
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

from verl_patches.trainer.main_ppo import compose

STEPS = 2


def answered(config: Any) -> DataProto:
    """Return this rank's share of a step's sequences, each of the maximum length."""
    data, count = (
        config.data,
        config.data.train_batch_size * config.actor_rollout_ref.rollout.n // dist.get_world_size(),
    )
    ids = torch.randint(10, 60, (count, data.max_prompt_length + data.max_response_length))
    positions = torch.arange(ids.size(1)).expand(count, -1).contiguous()
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    batch = DataProto.from_dict(columns | {"responses": ids[:, -data.max_response_length :].contiguous()})
    batch.meta_info = {"temperature": 1.0, "global_token_num": batch.batch["attention_mask"].sum(-1).tolist()}
    return batch


def step(worker: Any, reference: Any, critic: Any, config: Any) -> None:
    batch = answered(config)
    batch.batch["old_log_probs"] = worker.compute_log_prob(copy.deepcopy(batch)).batch["old_log_probs"]
    batch.batch["ref_log_prob"] = reference.compute_ref_log_prob(copy.deepcopy(batch)).batch["ref_log_prob"]
    batch.batch["advantages"] = torch.randn(batch.batch["responses"].shape)
    if critic is not None:
        batch.batch["values"] = critic.compute_values(copy.deepcopy(batch)).batch["values"]
        batch.batch["returns"] = batch.batch["values"] + torch.randn(batch.batch["responses"].shape)
        metrics = critic.update_critic(copy.deepcopy(batch)).meta_info["metrics"]
        assert set(metrics) >= {"critic/vf_loss", "critic/grad_norm", "critic/lr"}, metrics
    worker.update_actor(copy.deepcopy(batch))


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    config = compose(request["configuration"], request["overrides"])
    worker, reference = (ActorRolloutRefWorker(config=config.actor_rollout_ref, role=role) for role in ("actor", "ref"))
    worker.rollout_sharding_manager = None  # it would keep the random state of an engine, and there is none
    critic = CriticWorker(config=config.critic) if config.algorithm.adv_estimator == "gae" else None
    for each in filter(None, (critic, reference, worker)):  # in the same order as verl's driver
        each.init_model()
    for _ in range(STEPS):
        step(worker, reference, critic, config)
    dist.barrier()
