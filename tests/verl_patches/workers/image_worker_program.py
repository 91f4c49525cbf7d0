"""One rank of verl's FSDP worker that trains and serves the tiny Qwen2.5-VL in float32 for two steps, without Ray.

FOLDER/model is the checkpoint, FOLDER/data the task. The results go to FOLDER/found.RANK.json.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from transformers import AutoModelForVision2Seq, AutoProcessor
from verl import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.fsdp_workers import ActorRolloutRefWorker

from post_training.layouts.layout import RolloutPlacement
from post_training.layouts.published_names import published_name
from post_training.models.families import table_for
from verl_patches.trainer.main_ppo import compose

PROMPTS = 4
_GENERATED_FROM = ["raw_prompt_ids", "multi_modal_data"]


def rollout(worker: Any, rows: list, config: Any) -> DataProto:
    """Generate the answers to this rank's share of the rows, and join them with their prompts as verl's loop does."""
    batch = DataProto.from_single_dict(collate_fn(rows)).chunk(dist.get_world_size())[dist.get_rank()]
    asked = batch.pop(["input_ids", "attention_mask", "position_ids"], _GENERATED_FROM)
    asked.meta_info["do_sample"] = True
    answers = worker.generate_sequences(asked)
    batch = batch.repeat(config.actor_rollout_ref.rollout.n, interleave=True).union(answers)
    batch.meta_info |= {
        "temperature": 1.0,
        "global_token_num": batch.batch["attention_mask"].sum(-1).tolist(),
        "micro_batch_size": 4,
    }
    return batch


def referee(model: Any, batch: DataProto) -> tuple[float, int]:
    """Return the largest difference from transformers' log-probs, and how many rows have transformers' positions."""
    worst, right = 0.0, 0
    for row in range(len(batch)):
        item = batch[row]
        mask, images = item.batch["attention_mask"].bool(), item.non_tensor_batch["multi_modal_inputs"]
        tokens = item.batch["input_ids"][mask].unsqueeze(0)
        positions, _ = model.model.get_rope_index(tokens, images["image_grid_thw"])
        right += torch.equal(item.batch["position_ids"][:, mask], positions[:, 0])
        count = int(item.batch["attention_mask"][-item.batch["responses"].size(0) :].sum())
        with torch.no_grad():
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **images).logits[0]
        expected = logits.log_softmax(-1)[-count - 1 : -1].gather(1, tokens[0, -count:, None])[:, 0]
        for name in ("old_log_probs", "rollout_log_probs"):
            worst = max(worst, (item.batch[name][:count] - expected).abs().max().item())
    return worst, right


def differing(worker: Any, trained: dict[str, torch.Tensor]) -> list[str]:
    """Return the weights of this rank's engine that are not bit-identical to training's."""
    placement = RolloutPlacement(worker.config.rollout.tensor_model_parallel_size)
    served = dict(worker.rollout_sharding_manager.model_runner.model.named_parameters())
    shards = table_for(worker.actor_model_config).vllm_ascend(placement, dist.get_rank() % placement.tp)
    cuts = ((shard, tuple(slice(*edge) for edge in shard.bounds)) for shard in shards if shard.hf_name)
    return [
        shard.hf_name for shard, cut in cuts if not torch.equal(shard.locate(served).cpu(), trained[shard.hf_name][cut])
    ]


def whole_weights(worker: Any) -> dict[str, torch.Tensor]:
    """Return all weights of training, by their names in files. Collective."""
    return {
        published_name(name): (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
        for name, value in worker.actor_module_fsdp.state_dict().items()
    }


@contextmanager
def observed(worker: Any, trained: dict[str, torch.Tensor]) -> Iterator[list[list[str]]]:
    """Yield a list that collects the result of `differing` each time that the engine, with its weights, generates."""
    found: list[list[str]] = []
    generate = worker.rollout.generate_sequences

    def compared(*args: Any, **options: Any) -> DataProto:
        found.append(differing(worker, trained))
        return generate(*args, **options)

    with mock.patch.object(worker.rollout, "generate_sequences", compared):
        yield found


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    config = compose("rehearsal_images", request["overrides"])
    processor = AutoProcessor.from_pretrained(folder / "model", use_fast=False)
    data = RLHFDataset(str(folder / "data" / "train.parquet"), processor.tokenizer, config.data, processor)
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))  # a Ray worker sees only its own die
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor_rollout_ref")
    worker.init_model()
    model = AutoModelForVision2Seq.from_pretrained(folder / "model", torch_dtype=torch.float32).eval()
    rank = dist.get_rank()
    found: list[dict[str, Any]] = []
    for step in range(2):
        asked = range(step * PROMPTS, (step + 1) * PROMPTS)
        weights = whole_weights(worker)
        _load(model, weights)
        with observed(worker, weights) as seen:
            batch = rollout(worker, [data[row] for row in asked], config)
        batch = batch.union(_only(worker.compute_log_prob(copy.deepcopy(batch)), "old_log_probs"))
        batch = batch.union(worker.compute_ref_log_prob(copy.deepcopy(batch)))
        worst, right = referee(model, batch)
        random = torch.Generator().manual_seed(step)
        batch.batch["advantages"] = torch.randn(batch.batch["responses"].shape, generator=random)
        metrics = worker.update_actor(copy.deepcopy(batch)).meta_info["metrics"]
        found.append(
            {
                "worst": worst,
                "right": right,
                "rows": len(batch),
                "differing": seen[0],
                "grad_norm": float(numpy.mean(metrics["actor/grad_norm"])),
                "reported": float(numpy.mean(metrics["training/rollout_logprob_diff_max"])),
                "moved": [
                    name for name, value in whole_weights(worker).items() if not torch.equal(value, weights[name])
                ],
                "all": len(weights),
            }
        )
    (folder / f"found.{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def _only(data: DataProto, name: str) -> DataProto:
    return DataProto.from_dict({name: data.batch[name]})


def _load(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Load these weights into transformers' model; all of its weights must be among them."""
    own = model.state_dict()
    model.load_state_dict({name: weights[published_name(name)] for name in own})
