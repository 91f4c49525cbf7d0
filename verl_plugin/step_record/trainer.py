"""verl's synchronous trainer, which records the steps in `trainer.record_steps`: `sync_recorded`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics

from post_training.masking import masked
from post_training.report.run_folder import at
from verl_plugin.heartbeats.settings import hang_problems
from verl_plugin.heartbeats.trainer import DetectsHangs
from verl_plugin.rollout.trainer import ServesWindows
from verl_plugin.step_record.checks import MOST, MOST_MIB, record_problems, recorded_steps
from verl_plugin.step_record.folder import Column, RecordedStep, RecordError, write_record
from verl_plugin.trainer_modes import RECORDED

RECORDS = "records"
"""Folder of the records, beside the checkpoints."""


class RecordsSteps:
    """Mixin for a trainer of verl. It records the update's inputs, which contain the results of all earlier stages."""

    config: Any
    global_steps: int

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """As upstream; then write the record if the step is one to record."""
        if self.global_steps not in recorded_steps(self.config):
            return super()._update_actor(batch, metrics)  # type: ignore[misc]  # of the trainer that this extends
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        batch = super()._update_actor(batch, metrics)  # type: ignore[misc]  # of the trainer that this extends
        config: Any = OmegaConf.to_container(self.config, resolve=True)
        columns = {name: Column.of(value) for name, value in data.items() if _is_tensor(value)}
        record = RecordedStep(
            step=self.global_steps,
            keys=list(batch.keys),
            columns=columns,
            given=dict(batch.extra_info),
            metrics=reduce_metrics(dict(metrics)),
            config=masked(config),
            dies=config["trainer"]["nnodes"] * config["trainer"]["n_gpus_per_node"],
            left_out=sorted(set(data.keys()) - columns.keys()),
            padding=[key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding")],
        )
        self._write(record, Path(config["trainer"]["default_local_dir"]), at(config, MOST) or MOST_MIB)
        return batch

    def _write(self, record: RecordedStep, checkpoints: Path, most_mib: int) -> None:
        """Write a record. If that fails, print a warning; the run goes on."""
        folder, before = checkpoints / RECORDS / f"step_{record.step}", checkpoints / f"global_step_{record.step - 1}"
        resumed = Path(str(at(record.config, "trainer.resume_from_path")))
        if at(record.config, "trainer.resume_mode") == "resume_path" and resumed.name == before.name:
            before = resumed  # the checkpoint that this run continues, of another run or its own
        try:
            if folder.exists():
                raise RecordError(f"{folder} exists. Remove it to record the step again")
            if record.step > 1 and not before.is_dir():
                raise RecordError(f"{before}, with the weights before it, does not exist")
            write_record(folder, record, before / "actor" if record.step > 1 else None, most_mib)
        except Exception as error:  # safetensors has one of its own for a full disk
            print(f"warning: step {record.step} is not recorded: {error}", file=sys.stderr, flush=True)
        else:
            print(f"Step {record.step} is recorded in {folder}", flush=True)


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


@register_trainer(RECORDED)
class RecordingTrainer(ServesWindows, DetectsHangs, RecordsSteps, PPOTrainerSync):
    """verl's `sync`, which records steps."""

    def __init__(self, config: Any) -> None:
        """Check the configuration, and change it to one of `sync`.

        Raises:
            ValueError: the steps cannot be recorded, or hang detection is configured wrongly.
        """
        plain: Any = OmegaConf.to_container(config, resolve=True)
        for problem in (*record_problems(plain), *hang_problems(plain)):
            raise ValueError(problem)
        # verl decides several things by the name of its synchronous mode; they apply here too.
        config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)
