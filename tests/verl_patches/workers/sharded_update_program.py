"""Ranks that run two steps of verl's FSDP workers with either strategy; test_sharded_updates.py checks the results.

The answers are made up. request.json: the configuration, its overrides, and each job's own overrides by name. Every
rank writes its results to ``rank<n>.json``.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from verl import DataProto
from verl.utils import fsdp_utils
from verl.workers.actor import dp_actor
from verl.workers.fsdp_workers import ActorRolloutRefWorker

from tests.device_bytes import bytes_of_tensors
from verl_patches.features.compatibility.fully_sharded import release
from verl_patches.trainer.main_ppo import compose

STEPS = 2
POSITIONS_NOT_CUT = "positions not cut"


def answered(config: Any, step: int, dropped: int) -> DataProto:
    """Return this rank's share of a step; the first `dropped` answers of the whole step have no advantage."""
    numbers, data = torch.Generator().manual_seed(step), config.data
    count, length = data.train_batch_size * config.actor_rollout_ref.rollout.n, data.max_response_length
    ids = torch.randint(10, 60, (count, data.max_prompt_length + length), generator=numbers)
    # Prompts are padded on the left, answers on the right.
    begins, ends = (
        torch.randint(0, most // 2, (count, 1), generator=numbers) for most in (data.max_prompt_length, length)
    )
    places = torch.arange(ids.size(1))
    mask = ((places >= begins) & (places < ids.size(1) - ends)).long()
    advantages = torch.randn(count, length, generator=numbers)
    advantages[:dropped] = 0
    mine, mask, advantages = (
        each.chunk(dist.get_world_size())[dist.get_rank()] for each in (ids * mask, mask, advantages)
    )
    columns = {"input_ids": mine, "attention_mask": mask, "advantages": advantages}
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = DataProto.from_dict(columns | {"position_ids": positions, "responses": mine[:, -length:].contiguous()})
    batch.meta_info = {"temperature": 1.0, "global_token_num": batch.batch["attention_mask"].sum(-1).tolist()}
    return batch


def run(config: Any, dropped: int) -> dict[str, Any]:
    node = config.actor_rollout_ref
    worker, reference = (ActorRolloutRefWorker(config=copy.deepcopy(node), role=role) for role in ("actor", "ref"))
    worker.rollout_sharding_manager = None  # there is no engine whose random numbers it would keep
    for each in (reference, worker):
        each.init_model()
    found: dict[str, Any] = {"norms": [], "exact_norms": [], "log_probs": []}
    record_exact_norms(worker.actor, found["exact_norms"])
    for step in range(STEPS):
        batch = answered(config, step, dropped)
        resting = bytes_of_tensors()
        batch.batch["old_log_probs"] = worker.compute_log_prob(copy.deepcopy(batch)).batch["old_log_probs"]
        batch.batch["ref_log_prob"] = reference.compute_ref_log_prob(copy.deepcopy(batch)).batch["ref_log_prob"]
        found["left"] = bytes_of_tensors() - resting
        metrics = worker.update_actor(copy.deepcopy(batch)).meta_info["metrics"]
        found["norms"] += metrics["actor/grad_norm"]
        counted = batch.batch["attention_mask"][:, -config.data.max_response_length :]
        found["log_probs"].append(over_ranks(batch.batch["old_log_probs"] * counted))
    found["version"] = fsdp_utils.fsdp_version(worker.actor_module_fsdp)
    if found["version"] == 2:
        found["gathered"] = gathered(worker.actor_module_fsdp)
        found["moves"] = moved(worker.actor_module_fsdp)
    return found


def over_ranks(values: torch.Tensor) -> float:
    """Return the sum over all ranks in float64 on the host, which no device kernel rounds."""
    sums: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(sums, values.cpu().double().sum().item())
    return sum(sums)


def record_exact_norms(actor: Any, norms: list[float]) -> None:
    """Record the gradient norm of each update before verl clips the gradients."""
    upstream = actor._optimizer_step

    def step() -> torch.Tensor:
        gradients = [each.grad for each in actor.actor_module.parameters() if each.grad is not None]
        own = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
        norms.append(over_ranks(torch.cat([each.flatten() for each in own]).cpu().double().square()) ** 0.5)
        return upstream()

    actor._optimizer_step = step


def gathered(model: torch.nn.Module) -> int:
    """Return the bytes that embeddings, norm and output layer take while gathered."""
    fsdp_utils.load_fsdp_model_to_gpu(model)
    before = bytes_of_tensors()
    model.unshard()
    taken = bytes_of_tensors() - before
    release(model)
    return taken


def moved(model: torch.nn.Module) -> list[int]:
    """Return the bytes of this rank's weights, those offloaded, those loaded back, and those that verl offloads."""
    fsdp_utils.load_fsdp_model_to_gpu(model)
    weights = sum(parameter.to_local().nbytes for parameter in model.parameters())
    there = bytes_of_tensors()
    fsdp_utils.offload_fsdp_model_to_cpu(model)
    away = bytes_of_tensors()
    fsdp_utils.load_fsdp_model_to_gpu(model)
    back = bytes_of_tensors()
    fsdp_utils.offload_fsdp2_model_to_cpu.__wrapped__(model)
    return [weights, there - away, back - away, back - bytes_of_tensors()]


@contextmanager
def positions_of_the_first_rank() -> Iterator[None]:
    """Give every rank that shares sequences the positions of their beginning, as if sequences were not cut."""
    upstream = dp_actor.ulysses_pad_and_slice_inputs

    def cut(ids: torch.Tensor, position_ids_rmpad: torch.Tensor | None = None, sp_size: int = 1) -> tuple[Any, ...]:
        own, positions, padding = upstream(ids, position_ids_rmpad, sp_size)
        return own, None if positions is None else position_ids_rmpad[:, : own.size(1)].contiguous(), padding

    with mock.patch.object(dp_actor, "ulysses_pad_and_slice_inputs", cut):
        yield


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    found = {}
    for name, (overrides, dropped) in request["jobs"].items():
        with positions_of_the_first_rank() if name == POSITIONS_NOT_CUT else nullcontext():
            found[name] = run(compose(request["configuration"], [*request["overrides"], *overrides]), dropped)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
