"""Ranks that train verl's Megatron critic worker without Ray, actor or engine; test_critic.py checks the results.

request.json: overrides of the rehearsal's configuration, and whether to resume. Every rank writes ``rank<n>.json``.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl import DataProto
from verl.workers.megatron_workers import CriticWorker

from post_training.live_tensors import gradient_tensors, optimizer_tensors, parameter_tensors
from tests.device_bytes import bytes_of_tensors
from verl_patches.features import settings
from verl_patches.features.measure.step_record import current_record
from verl_patches.features.residency.storages import device_storages
from verl_patches.features.training_checkpoint.background import process_writer
from verl_patches.trainer.main_ppo import compose
from verl_patches.workers.process_residency import process_residency


def answered(config: Any, seed: int) -> DataProto:
    """Return a step with answers of maximum length, equal on every rank of the single replica."""
    data, generator = config.data, torch.Generator().manual_seed(seed)
    shape = (config.data.train_batch_size * config.actor_rollout_ref.rollout.n, data.max_response_length)
    ids = torch.randint(10, 60, (shape[0], data.max_prompt_length + shape[1]), generator=generator)
    positions = torch.arange(ids.size(1)).expand(len(ids), -1).contiguous()
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    columns |= {"responses": ids[:, -shape[1] :].contiguous(), "returns": torch.randn(shape, generator=generator)}
    batch = DataProto.from_dict(columns)
    batch.meta_info = {"global_token_num": batch.batch["attention_mask"].sum(-1).tolist(), "training_step": seed}
    return batch


class Training:
    """The worker, and its steps."""

    def __init__(self, config: Any):
        self._config = config
        self.worker = CriticWorker(config=config.critic)
        self.worker.init_model()

    def step(self, seed: int, bad: float | None = None) -> dict[str, Any]:
        """Run a step with `bad` as one return. Return this rank's metrics and values, and its state's digest."""
        batch = answered(self._config, seed)
        values = self.worker.compute_values(copy.deepcopy(batch)).batch["values"]
        batch.batch["values"] = values
        if bad is not None:
            batch.batch["returns"][0, 0] = bad
        process_writer().finish()
        metrics = self.worker.update_critic(copy.deepcopy(batch)).meta_info["metrics"]
        kept = {name: value for name, value in metrics.items() if not name.startswith("perf/")}
        return {"metrics": kept, "values": values.flatten().tolist(), "bits": self.bits()}

    def bits(self) -> str:
        """Return a digest of weights and optimizer state."""
        process_residency().enter("critic_checkpoint")
        total = hashlib.sha256()
        for size in self.storages():
            total.update(torch.empty(0, dtype=torch.uint8, device="npu").set_(size).cpu().numpy().tobytes())
        return total.hexdigest()

    def storages(self, gradients: bool = False) -> list[Any]:
        worker = self.worker
        tensors = [*parameter_tensors(worker.critic_module), *optimizer_tensors(worker.critic_optimizer)]
        tensors += gradient_tensors(worker.critic_module) if gradients else []
        return list(device_storages(tensors).values())

    def resident(self) -> dict[str, int]:
        """Return the tensor bytes in the phases ref, values and update_critic, and those of the critic itself."""
        found = {}
        for phase in ("ref", "values", "update_critic"):
            process_residency().enter(phase)
            found[phase] = bytes_of_tensors()
        whole = sum(storage.nbytes() for storage in self.storages(gradients=True))
        weights = device_storages(parameter_tensors(self.worker.critic_module)).values()
        return found | {"weights": sum(storage.nbytes() for storage in weights), "whole": whole}


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    config = compose("rehearsal", request["overrides"])
    settings.activate(settings.OverlaySettings.from_config(config.actor_rollout_ref))
    training, saved = Training(config), str(folder / "critic")
    found: dict[str, Any] = {"first": [training.step(1)]}
    current_record().peak_bytes.clear()  # one-time tensors, such as masks, exist by now
    found["first"].append(training.step(2))
    found["resident"] = training.resident()
    peaks = dict(current_record().peak_bytes)
    if request["resumes"]:
        training.worker.save_checkpoint(saved)
        found["saved_at_once"] = (folder / "critic" / "manifest.json").exists()
        found["unbroken"] = [training.step(seed) for seed in (3, 4)]
        training.worker.load_checkpoint(saved)
        found["resumed"] = [training.step(seed) for seed in (3, 4)]
        found["not_resumed"] = training.step(3)
        before = training.bits()
        found["skipped"] = training.step(5, bad=float("nan"))["bits"] == before
        found["skipped_count"] = current_record().counts["critic/nonfinite_steps"]
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found | {"peaks": peaks}))
    dist.barrier()
