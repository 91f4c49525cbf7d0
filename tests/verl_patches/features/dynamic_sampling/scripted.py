"""The training loop over workers that follow a script, in this process and without Ray.

The workers have one weight. Their answers depend on it, on the prompt and on their own random numbers; an update
changes it; a checkpoint holds it with the state of the random numbers. A resumed run is therefore bit-identical to the
unbroken one only if all state that decides about prompts is restored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.manifest import Manifest
from verl_patches.features import settings
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.overlong.feature import OVERLONG_FILTERING, OVERLONG_PENALTY
from verl_patches.features.rollout_correction.feature import ROLLOUT_CORRECTION
from verl_patches.features.settings import OverlaySettings
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT, CheckpointSettings
from verl_patches.features.training_checkpoint.trainer import resume_step, save_step
from verl_patches.trainer.main_ppo import compose
from verl_patches.trainer.ppo import middleware

PROMPT, RESPONSE, PADDING, END = 3, 4, 0, 9
WRONG, RIGHT = 5, 6


class Prompts:
    """A dataset of `rows` prompts; a prompt's difficulty is its number over `rows`."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        ids = torch.tensor([PADDING, 10 + row, 3])
        return {
            "input_ids": ids,
            "attention_mask": torch.tensor([0, 1, 1]),
            "position_ids": torch.tensor([0, 0, 1]),
            "raw_prompt_ids": ids[1:].tolist(),
            "data_source": "script",
            "index": row,
        }


class ScriptedWorkers:
    """verl's worker group. `chance(row, weight)` is how likely an answer is right."""

    world_size = 2

    def __init__(self, n: int, chance: Callable[[int, float], float]) -> None:
        self._n, self._chance = n, chance
        self.random = torch.Generator().manual_seed(11)
        self.weight = 0.0
        self.asked: list[list[int]] = []
        self.trained: list[list[int]] = []
        self.killed_at: int | None = None

    def generate_sequences(self, prompts: Any) -> Any:
        from verl import DataProto

        assert len(prompts) % self.world_size == 0
        ids = prompts.batch["input_ids"]
        self.asked.append([int(row) for row in ids[:, 1] - 10])
        if len(self.asked) == self.killed_at:
            raise Killed
        ids, mask, places = (
            prompts.batch[name].repeat_interleave(self._n, 0)
            for name in ("input_ids", "attention_mask", "position_ids")
        )
        responses = torch.full((len(ids), RESPONSE), PADDING)
        for answer, row in zip(responses, (ids[:, 1] - 10).tolist(), strict=True):
            drawn, length = torch.rand(2, generator=self.random, dtype=torch.float64).tolist()
            answer[:] = 7
            answer[0] = RIGHT if drawn < self._chance(row, self.weight) else WRONG
            if length < 0.75:
                place = 1 + int(length * 4)
                answer[place], answer[place + 1 :] = END, PADDING
        kept = (responses != PADDING).long()
        further = torch.arange(1, RESPONSE + 1)[None] + places[:, -1:]
        columns = {
            "prompts": ids,
            "responses": responses,
            "input_ids": torch.cat([ids, responses], -1),
            "attention_mask": torch.cat([mask, kept], -1),
            "position_ids": torch.cat([places, further], -1),
        }
        return DataProto.from_dict(columns)

    def compute_log_prob(self, batch: Any) -> Any:
        from verl import DataProto

        zeros = torch.zeros(batch.batch["responses"].shape)
        return DataProto.from_dict({"old_log_probs": zeros, "entropys": zeros.clone()})

    def update_actor(self, batch: Any) -> Any:
        self.trained.append(sorted(int(row) for row in batch.non_tensor_batch["index"][:: self._n]))
        mask = batch.batch["attention_mask"][:, -RESPONSE:]
        right = (batch.batch["responses"][:, :1] == RIGHT).double()
        step = (batch.batch["advantages"].double() * right * mask).sum() / mask.sum()
        self.weight = 0.5 * self.weight + step.item()
        return SimpleNamespace(meta_info={"metrics": {"actor/weight": [self.weight]}})

    def save_checkpoint(self, folder: str, hdfs_path: None, step: int) -> None:
        file = Path(folder, "rank-00000-of-00001.safetensors")
        content = json.dumps([self.weight, self.random.get_state().tolist()])

        def write() -> None:
            file.parent.mkdir()
            file.write_text(content)
            Manifest({}, files={file.name: hash_file(file, lambda _: None)}, complete=True).write(file.parent)

        self.finish_checkpoint = write
        if not self.in_background:
            write()

    def load_checkpoint(self, folder: str, del_local_after_load: bool) -> None:
        self.weight, state = json.loads(Path(folder, "rank-00000-of-00001.safetensors").read_text())
        self.random.set_state(torch.tensor(state, dtype=torch.uint8))


class Killed(BaseException):
    """The process was killed."""


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    from verl.utils.dataset.rl_dataset import collate_fn

    return collate_fn(items)


def accuracy_reward(data: Any, return_dict: bool = False) -> Any:
    """Score a right answer 1 at its last token, minus 0.5 for an answer of the full length; acc ignores the length."""
    responses = data.batch["responses"]
    mask = data.batch["attention_mask"][:, -RESPONSE:]
    right, last = (responses[:, 0] == RIGHT).float(), mask.sum(-1) - 1
    rewards = torch.zeros(responses.shape)
    rewards[torch.arange(len(rewards)), last] = right - 0.5 * (last == RESPONSE - 1)
    return {"reward_tensor": rewards, "reward_extra_info": {"acc": right.tolist()}} if return_dict else rewards


class Records:
    """A stand-in for verl's tracking that keeps the metrics of every step."""

    steps: dict[int, dict[str, Any]]
    timing: dict[int, dict[str, float]]

    def __init__(self, **_: Any) -> None:
        type(self).steps, type(self).timing = {}, {}

    def log(self, data: dict[str, Any], step: int) -> None:
        self.steps[step] = {name: value for name, value in data.items() if not name.startswith(("timing", "perf"))}
        self.timing[step] = {name: value for name, value in data.items() if name.startswith("timing_s")}


FEATURES = (TRAINING_CHECKPOINT, OVERLONG_FILTERING, MEASURE, OVERLONG_PENALTY, ROLLOUT_CORRECTION)
"""The features whose middleware needs neither Ray nor a device."""
TRAINING = {MEASURE: lambda trainer: nullcontext()}
"""Replaces the measurement around the training: scripted workers compare no log-probs, which a valid run must do."""


def make_trainer(
    folder: Path,
    *overrides: str,
    rows: int = 23,
    n: int = 4,
    chance: Callable[[int, float], float] = lambda row, weight: (row % 8) / 7,
    reward: Callable[..., Any] = accuracy_reward,
    in_background: bool = False,
    workers: Callable[..., ScriptedWorkers] = ScriptedWorkers,
    configuration: str = "rehearsal",
) -> Any:
    """Build verl's trainer as its driver does, with scripted workers; DAPO's filter is on by default.

    in_background: the workers write a checkpoint only when they are asked to finish it.
    """
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from verl_patches.trainer.ppo.trainer import OverlayTrainer

    class Scripted(RayPPOTrainer):
        validations = 0

        def __init__(self) -> None:
            self.global_steps = 0

        def init_workers(self) -> None:
            self.actor_rollout_wg = workers(n, chance)
            self.actor_rollout_wg.in_background = in_background

        def _validate(self) -> dict[str, float]:
            self.validations += 1
            return {"val/acc": self.actor_rollout_wg.weight}

    class Trainer(OverlayTrainer, Scripted):
        def _save_checkpoint(self) -> None:
            save_step(self, CheckpointSettings(), in_background)

        def _load_checkpoint(self) -> None:
            resume_step(self, "")

    data = folder / "train.parquet"
    data.write_text("rows")
    trainer = Trainer()
    trainer.config = _job(configuration, folder, data, n, overrides)
    trainer.tokenizer = SimpleNamespace(eos_token_id=END, pad_token_id=PADDING)
    trainer.reward_fn = trainer.val_reward_fn = reward
    trainer.use_rm = trainer.use_critic = trainer.use_reference_policy = False
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
    alone = tuple(replace(each, training=TRAINING.get(each.feature, each.training)) for each in middleware.MIDDLEWARE
                  if each.feature in FEATURES)  # fmt: skip
    with _in_force(trainer), mock.patch.object(middleware, "MIDDLEWARE", alone):
        trainer._create_dataloader(Prompts(rows), Prompts(2), collate, None)
        trainer.init_workers()
    return trainer


def _job(configuration: str, folder: Path, data: Path, n: int, overrides: tuple[str, ...]) -> Any:
    return compose(
        configuration,
        [
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=acc",
            "data.train_batch_size=4",
            f"data.train_files={data}",
            f"actor_rollout_ref.rollout.n={n}",
            "actor_rollout_ref.model.path=/weights",
            f"trainer.default_local_dir={folder}/checkpoints",
            "actor_rollout_ref.overlay.measure.output_dir=null",
            "trainer.total_training_steps=6",
            "trainer.total_epochs=50",
            "trainer.balance_batch=false",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            *overrides,
        ],
    )


def _in_force(trainer: Any) -> Any:
    """Activate the trainer's own settings while the block lasts."""
    chosen = OverlaySettings.from_config(trainer.config.actor_rollout_ref, trainer.config)
    return mock.patch.object(settings, "_current", chosen)


def fit(trainer: Any) -> dict[int, dict[str, Any]]:
    """Train, and return every step's metrics except timings."""
    with _in_force(trainer), mock.patch("verl.utils.tracking.Tracking", Records):
        trainer.fit()
    return Records.steps
