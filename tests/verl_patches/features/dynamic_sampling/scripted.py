"""verl's own training loop over workers that follow a script, in this process and without Ray.

The workers have one weight. What they answer depends on it, on the prompt and on random numbers of their own; an update
changes it; a checkpoint holds it with the state of the random numbers. So a run that goes on is the unbroken one bit
for bit only if everything that decides about prompts has come back.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from overlay.declaration import declared
from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.manifest import Manifest
from verl_patches.features.dynamic_sampling import source
from verl_patches.features.settings import OverlaySettings
from verl_patches.features.training_checkpoint.feature import CheckpointSettings
from verl_patches.features.training_checkpoint.trainer import process_publisher, resume_step, save_step
from verl_patches.trainer.main_ppo import compose
from verl_patches.trainer.ppo import ray_trainer

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
    """The process is gone."""


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    from verl.utils.dataset.rl_dataset import collate_fn

    return collate_fn(items)


def accuracy_reward(data: Any, return_dict: bool = False) -> Any:
    """1 for a right answer, at its last token, with acc beside it; half a point less for a long one."""
    responses = data.batch["responses"]
    mask = data.batch["attention_mask"][:, -RESPONSE:]
    right, last = (responses[:, 0] == RIGHT).float(), mask.sum(-1) - 1
    rewards = torch.zeros(responses.shape)
    rewards[torch.arange(len(rewards)), last] = right - 0.5 * (last == RESPONSE - 1)
    return {"reward_tensor": rewards, "reward_extra_info": {"acc": right.tolist()}} if return_dict else rewards


class Records:
    """In the place of verl's tracking: keeps every step, and lets its checkpoint have its name."""

    steps: dict[int, dict[str, Any]]
    timing: dict[int, dict[str, float]]

    def __init__(self, **_: Any) -> None:
        type(self).steps, type(self).timing = {}, {}

    def log(self, data: dict[str, Any], step: int) -> None:
        self.steps[step] = {name: value for name, value in data.items() if not name.startswith(("timing", "perf"))}
        self.timing[step] = {name: value for name, value in data.items() if name.startswith("timing_s")}
        process_publisher().logged(step, data)


# In the order in which the engine calls them, the innermost first.
INITIALISATIONS = (
    ray_trainer.init_workers_that_report_the_batch,
    ray_trainer.init_workers_with_penalty,
    ray_trainer.init_workers_that_correct,
    ray_trainer.init_workers_that_filter_truncated,
    ray_trainer.init_workers_of_the_source,
    ray_trainer.init_workers_of_finished,
    ray_trainer.init_workers_that_finish_a_checkpoint,
)


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
    """verl's trainer as its driver makes it, less its workers, with DAPO's filter on unless the overrides say other.

    in_background: the workers write a checkpoint when they are asked to finish it.
    """
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    class Trainer(RayPPOTrainer):
        validations = 0

        def __init__(self) -> None:
            self.global_steps = 0

        def init_workers(self) -> None:
            self.actor_rollout_wg = workers(n, chance)
            self.actor_rollout_wg.in_background = in_background

        def _validate(self) -> dict[str, float]:
            self.validations += 1
            return {"val/acc": self.actor_rollout_wg.weight}

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
    trainer.async_rollout_mode = trainer.use_rm = trainer.use_critic = trainer.use_reference_policy = False
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
    make_loaders = inspect.unwrap(RayPPOTrainer._create_dataloader)
    for body in (ray_trainer.create_prompt_source, ray_trainer.create_source_of_finished):
        make_loaders = _in_force(trainer, body, make_loaders)
    make_loaders(trainer, Prompts(rows), Prompts(2), collate, None)
    init = type(trainer).init_workers
    for body in INITIALISATIONS:
        init = _in_force(trainer, body, init)
    init(trainer)
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
            "trainer.total_training_steps=6",
            "trainer.total_epochs=50",
            "trainer.balance_batch=false",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            *overrides,
        ],
    )


def _in_force(trainer: Any, body: Callable[..., Any], upstream: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in upstream's place for the patch with this body, by the trainer's own configuration."""
    (patch,) = [each for each in declared() if each.body is body]
    chosen = OverlaySettings.from_config(trainer.config.actor_rollout_ref, trainer.config)
    return functools.partial(body, upstream) if patch.feature.is_on(chosen) else upstream


def fit(trainer: Any) -> dict[int, dict[str, Any]]:
    """verl's training loop; returns the metrics of every step but those of time."""
    from verl.trainer.ppo import ray_trainer as upstream

    with ExitStack() as stack:
        stack.enter_context(mock.patch("verl.utils.tracking.Tracking", Records))
        timed = upstream._timer
        for body in (ray_trainer.timer, ray_trainer.timer_of_finished):
            timed = _in_force(trainer, body, timed)
        stack.enter_context(mock.patch.object(upstream, "_timer", timed))
        stack.callback(source.put_in_force, None)
        loop = _in_force(trainer, ray_trainer.fit_while_prompts_last, inspect.unwrap(upstream.RayPPOTrainer.fit))
        _in_force(trainer, ray_trainer.fit_to_the_last_checkpoint, loop)(trainer)
    return Records.steps
