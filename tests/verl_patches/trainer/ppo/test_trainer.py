"""The training loop makes verl's calls to workers, with the same columns, and reports the same metrics."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from verl_patches.features import settings
from verl_patches.features.data_order.loader import NextPrompts
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.main_ppo import compose
from verl_patches.trainer.ppo.trainer import OverlayTrainer

PROMPT, RESPONSE, ROWS, N = 3, 5, 4, 2
EPOCHS, STEPS = 2, 5
"""An epoch has two batches, so the prompts end before the last step."""

Call = tuple[str, str]


def digest(batch: DataProto) -> str:
    """Return a digest of a batch's columns, regardless of their order, and of its meta information."""
    tensors = {name: (str(each.dtype), each.tolist()) for name, each in sorted(batch.batch.items())}
    others = {name: [str(value) for value in each] for name, each in sorted(batch.non_tensor_batch.items())}
    content = json.dumps([tensors, others, batch.meta_info], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


class Group:
    """A worker group whose answers are drawn from the request's digest; it records every call."""

    world_size = 2

    def __init__(self, calls: list[Call], samples_log_probs: bool) -> None:
        self._calls, self._samples_log_probs = calls, samples_log_probs

    def _drawn(self, name: str, batch: DataProto) -> np.random.Generator:
        found = digest(batch)
        self._calls.append((name, found))
        return np.random.default_rng(int(found[:8], 16))

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        drawn = self._drawn("generate_sequences", prompts)
        n = N if prompts.meta_info.get("do_sample", True) else 1
        columns = {name: each.repeat_interleave(n, 0) for name, each in prompts.batch.items()}
        rows = len(columns["input_ids"])
        lengths = torch.from_numpy(drawn.integers(1, RESPONSE + 1, rows))
        kept = (torch.arange(RESPONSE)[None] < lengths[:, None]).long()
        responses = torch.from_numpy(drawn.integers(4, 9, (rows, RESPONSE))) * kept
        answers = {
            "prompts": columns["input_ids"],
            "responses": responses,
            "input_ids": torch.cat((columns["input_ids"], responses), -1),
            "attention_mask": torch.cat((columns["attention_mask"], kept), -1),
            "position_ids": torch.cat((columns["position_ids"], PROMPT + torch.arange(RESPONSE).expand(rows, -1)), -1),
        }
        if self._samples_log_probs and n > 1:
            answers["rollout_log_probs"] = -torch.from_numpy(drawn.random((rows, RESPONSE))).float()
        return DataProto.from_dict(answers)

    def _tokens(self, name: str, batch: DataProto, *columns: str) -> DataProto:
        drawn, shape = self._drawn(name, batch), batch.batch["responses"].shape
        return DataProto.from_dict({each: -torch.from_numpy(drawn.random(shape)).float() for each in columns})

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return self._tokens("compute_log_prob", batch, "old_log_probs", "entropys")

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return self._tokens("compute_ref_log_prob", batch, "ref_log_prob")

    def compute_values(self, batch: DataProto) -> DataProto:
        return self._tokens("compute_values", batch, "values")

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        return self._tokens("compute_rm_score", batch, "rm_scores")

    def update_actor(self, batch: DataProto) -> Any:
        drawn = self._drawn("update_actor", batch)
        return SimpleNamespace(meta_info={"metrics": {"actor/pg_loss": drawn.random(3).tolist()}})

    def update_critic(self, batch: DataProto) -> Any:
        drawn = self._drawn("update_critic", batch)
        return SimpleNamespace(meta_info={"metrics": {"critic/vf_loss": drawn.random(3).tolist()}})


def rows() -> list[dict[str, Any]]:
    """Return the batches of an epoch as verl's loader yields them."""
    made = []
    for first in (10, 20):
        ids = torch.arange(first, first + ROWS)[:, None].expand(-1, PROMPT).contiguous()
        raw = np.empty(ROWS, dtype=object)
        raw[:] = ids.tolist()
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        columns["position_ids"] = torch.arange(PROMPT).expand(ROWS, -1).contiguous()
        made.append({**columns, "raw_prompt_ids": raw, "index": np.arange(first, first + ROWS, dtype=object)})
    return made


def reward(data: DataProto, return_dict: bool = False) -> Any:
    """Reward each answer at its first token with its number of sevens."""
    responses = data.batch["responses"]
    rewards = torch.zeros(responses.shape)
    rewards[:, 0] = (responses == 7).sum(-1).float()
    further = {"acc": (rewards[:, 0] > 0).tolist()}
    return {"reward_tensor": rewards, "reward_extra_info": further} if return_dict else rewards


class Scripted:
    """The part of the job that both trainers share."""

    def __init__(self, folder: Path, overrides: list[str], roles: set[str]) -> None:
        self.config = compose(
            "rehearsal",
            [
                f"actor_rollout_ref.rollout.n={N}",
                f"trainer.total_epochs={EPOCHS}",
                f"+trainer.rollout_data_dir={folder}",
                "trainer.val_before_train=true",
                "trainer.test_freq=2",
                "trainer.save_freq=3",
                *overrides,
            ],
        )
        self.calls: list[Call] = []
        group = Group(self.calls, "log_probs" in roles)
        self.actor_rollout_wg = self.ref_policy_wg = self.critic_wg = self.rm_wg = group
        self.use_critic, self.use_reference_policy = "critic" in roles, "reference" in roles
        self.use_rm, self.ref_in_actor, self.async_rollout_mode = "reward model" in roles, False, False
        self.reward_fn = self.val_reward_fn = reward
        self.train_dataloader, self.middleware = rows(), []
        self.source = NextPrompts(self.train_dataloader, EPOCHS)
        self.total_training_steps = self.config.trainer.total_training_steps
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
        self.tokenizer = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: [str(each) for each in ids])
        if self.config.algorithm.use_kl_in_reward:
            from verl.trainer.ppo.core_algos import get_kl_controller

            self.kl_ctrl_in_reward = get_kl_controller(self.config.algorithm.kl_ctrl)

    def _load_checkpoint(self) -> None:
        self.calls.append(("load", ""))

    def _save_checkpoint(self) -> None:
        self.calls.append(("save", str(self.global_steps)))

    def _validate(self) -> dict[str, float]:
        self.calls.append(("validate", str(self.global_steps)))
        return {"val/score": float(self.global_steps)}


class Verls(Scripted, RayPPOTrainer):
    """verl's own loop."""

    fit = inspect.unwrap(RayPPOTrainer.fit)


class Ours(Scripted, OverlayTrainer):
    """The loop under test."""


def trained(kind: type, folder: Path, overrides: list[str], roles: set[str]) -> tuple[Any, ...]:
    """Train, and return the calls to workers, the logged metrics and the written files."""
    folder.mkdir()
    logged: list[tuple[int, dict[str, Any]]] = []
    tracker = SimpleNamespace(log=lambda data, step: logged.append((step, data)))
    numbers = itertools.count()
    with (
        mock.patch("verl.utils.tracking.Tracking", lambda **_: tracker),
        mock.patch("uuid.uuid4", lambda: next(numbers)),
        mock.patch.object(settings, "_current", OverlaySettings.all_off()),
    ):
        torch.manual_seed(1)
        trainer = kind(folder, overrides, roles)
        trainer.fit()
    metrics = [
        (step, {name: None if name.startswith(("timing", "perf")) else each for name, each in metrics.items()})
        for step, metrics in logged
    ]
    files = {file.name: file.read_text() for file in sorted(folder.iterdir())}
    return trainer.calls, metrics, files


GAE = ["algorithm.adv_estimator=gae", "trainer.critic_warmup=2"]
IN_REWARD = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.1"]


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ([], {"reference"}),
        (["trainer.balance_batch=true", "trainer.total_training_steps=3"], {"log_probs"}),
        ([*GAE, "trainer.total_training_steps=4"], {"critic", "reference", "log_probs"}),
        ([*IN_REWARD, "+trainer.val_only=true"], {"reference"}),
        (IN_REWARD, {"reference"}),
        (["algorithm.adv_estimator=remax"], {"reward model"}),
        (["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"], set()),
    ],
    ids=["grpo", "balanced", "critic", "validation", "kl in reward", "remax", "rloo"],
)
def test_a_run_is_that_of_verls_own_loop(tmp_path, overrides, roles):
    overrides = [f"trainer.total_training_steps={STEPS}", *overrides]
    expected = trained(Verls, tmp_path / "verls", overrides, roles)
    found = trained(Ours, tmp_path / "ours", overrides, roles)
    for ours, verls in zip(found, expected, strict=True):
        assert ours == verls
    assert ("validate", "0") in found[0]


def test_columns_that_workers_see_are_compared(tmp_path, monkeypatch):
    """The control: a stage that adds a column is detected."""
    overrides = [f"trainer.total_training_steps={STEPS}"]
    expected, _, _ = trained(Verls, tmp_path / "verls", overrides, {"reference"})
    assemble = OverlayTrainer.assemble

    def with_another(self, step, collected):
        batch = assemble(self, step, collected)
        batch.batch["another"] = torch.zeros(len(batch))
        return batch

    monkeypatch.setattr(OverlayTrainer, "assemble", with_another)
    assert trained(Ours, tmp_path / "ours", overrides, {"reference"})[0] != expected


def test_without_old_log_probs_no_worker_is_asked_for_them(tmp_path):
    """All other calls are made, and no column or metric takes the place of the log-probs."""
    overrides = [f"trainer.total_training_steps={STEPS}"]
    with mock.patch.object(OverlaySettings, "all_off", lambda: OverlaySettings(recompute_old_log_prob=False)):
        calls, metrics, _ = trained(Ours, tmp_path / "ours", overrides, {"reference", "log_probs"})
    names = [name for name, _ in calls if name not in ("load", "save", "validate")]
    assert names == ["generate_sequences", "compute_ref_log_prob", "update_actor"] * 4
    assert all("actor/entropy_loss" not in each and "timing_s/old_log_prob" in each for _, each in metrics[1:])
    assert not any("nan" in str(value) for _, each in metrics for value in each.values())
