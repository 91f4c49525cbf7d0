"""How the driver's patches are wired where a rollout has more ranks than engines, and where there is a critic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto

from post_training.plan.first_placement import first_placement
from tests.verl_patches.features.overlong.test_overlong import END, batch_of
from verl_patches.features import settings
from verl_patches.features.learning_rate.rates import STEP
from verl_patches.features.partial_rollout.columns import ROWS
from verl_patches.features.request_noise.seeds import SEED, Seeds
from verl_patches.features.settings import OverlaySettings
from verl_patches.features.training_checkpoint.kept_states import KeptStates
from verl_patches.trainer.ppo import ray_trainer

WIDTH = 16
LENGTHS = [9, 1, 12, 3, 7, 2, 15, 5]
"""Of answers to eight prompts: two engines and four would deal them out in different orders."""


class Workers:
    """Answers of a length that is the prompt's token; remembers what it was asked."""

    def __init__(self, world_size: int = 4) -> None:
        self.world_size, self.asked, self.updates = world_size, [], []
        self.sent: list[torch.Tensor] = []
        self.generate_sequences = self._answer
        self.update_actor = self.update_critic = self.updates.append
        self.compute_ref_log_prob = self.compute_log_prob = self.updates.append

    def _answer(self, prompts: DataProto) -> DataProto:
        lengths = prompts.batch["input_ids"]
        self.asked.append(lengths.flatten().tolist())
        self.sent += [prompts.batch[SEED]] if SEED in prompts.batch.keys() else []
        mask = (torch.arange(WIDTH)[None] < lengths).long()
        attention = torch.cat((torch.ones_like(lengths), mask), -1)
        return DataProto.from_dict({"responses": mask, "attention_mask": attention})


class Trainer(SimpleNamespace):
    """verl's trainer as far as the patches read it: two worker groups, the critic's if there is one."""

    def __init__(self, **changes: Any) -> None:
        rollout = {"tensor_model_parallel_size": 2}
        config = {"actor_rollout_ref": {"rollout": rollout, "model": {"path": "model"}}}
        given = {"config": OmegaConf.create(config), "global_steps": 3, "use_critic": True}
        super().__init__(**given | {"tokenizer": SimpleNamespace(eos_token_id=END)} | changes)

    def begin(self) -> None:
        """What verl's init_workers leaves."""
        self.actor_rollout_wg, self.critic_wg, self.ref_policy_wg = Workers(), Workers(), Workers()


def prompts(lengths: list[int]) -> DataProto:
    tokens = torch.tensor(lengths)[:, None]
    return DataProto.from_dict({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})


def test_placement_counts_engines_and_not_ranks():
    """Four ranks at rollout TP 2 are two engines, each of which takes half of the batch."""
    two, four = (first_placement(LENGTHS, engines) for engines in (2, 4))
    assert two != four
    trainer = Trainer()
    kept = "verl_patches.features.training_checkpoint.kept_states.process_kept_states"
    with mock.patch(kept, return_value=KeptStates()):
        ray_trainer.init_workers_by_length(Trainer.begin, trainer)
    workers = trainer.actor_rollout_wg
    for _ in range(2):
        workers.generate_sequences(prompts(LENGTHS))
    assert workers.asked == [LENGTHS, [LENGTHS[place] for place in two]]


@pytest.mark.parametrize("patch", [ray_trainer.init_workers_of_finished, ray_trainer.init_workers_of_the_source])
def test_sources_know_all_ranks_that_a_batch_is_cut_for(patch):
    """verl deals a batch out to ranks, of which several are one engine."""
    connected: list[Any] = []
    source = SimpleNamespace(
        connect=lambda *given: connected.extend(given), answering="ours", stored_reward=lambda reward_fn: reward_fn
    )
    patch(Trainer.begin, Trainer(train_dataloader=source, reward_fn=len))
    multiple = connected[1] if len(connected) == 2 else connected[0].multiple
    assert multiple == 4


def test_critic_knows_the_step_too():
    trainer = Trainer()
    ray_trainer.init_workers_that_know_the_step(Trainer.begin, trainer)
    for group, update in ((trainer.actor_rollout_wg, "update_actor"), (trainer.critic_wg, "update_critic")):
        getattr(group, update)(SimpleNamespace(meta_info={}))
        assert [batch.meta_info for batch in group.updates] == [{STEP: 3}]


def test_critic_is_not_trained_on_cut_answers():
    trainer = Trainer()
    ray_trainer.init_workers_that_filter_truncated(Trainer.begin, trainer)
    batch = batch_of([4, 4, 2], last=[END, 5, END])
    with mock.patch("verl.utils.model.get_generation_config", return_value=None):
        trainer.actor_rollout_wg.update_actor(batch)
        trainer.critic_wg.update_critic(batch)
    for group in (trainer.actor_rollout_wg, trainer.critic_wg):
        (seen,) = group.updates
        assert seen.batch["attention_mask"][:, -4:].any(-1).tolist() == [True, False, True]


def test_critic_waits_for_a_checkpoint_in_writing():
    order: list[str] = []

    def finishing_first(update: Any) -> Any:
        return lambda batch: order.append("finished") or update(batch)

    trainer = Trainer()
    publisher = SimpleNamespace(finishing_first=finishing_first)
    with mock.patch("verl_patches.features.training_checkpoint.trainer.process_publisher", return_value=publisher):
        ray_trainer.init_workers_that_finish_a_checkpoint(Trainer.begin, trainer)
    trainer.actor_rollout_wg.update_actor("batch")
    trainer.critic_wg.update_critic("batch")
    assert order == ["finished"] * 2 and trainer.critic_wg.updates == ["batch"]


@pytest.mark.parametrize("in_actor", [False, True])
def test_reference_policy_gets_handles(in_actor):
    """With LoRA the actor's workers are the reference policy's."""
    trainer = Trainer(use_reference_policy=True, ref_in_actor=in_actor)
    with mock.patch("ray.put", lambda each: each):
        ray_trainer.init_workers_that_keep_samples(Trainer.begin, trainer)
        ones = torch.ones(1, 2, dtype=torch.int64)
        columns = {"responses": ones, "attention_mask": ones.repeat(1, 2)}
        columns |= {"sample_id": ones[:, 0], "sample_lengths": ones}
        group = trainer.actor_rollout_wg if in_actor else trainer.ref_policy_wg
        group.compute_ref_log_prob(DataProto.from_dict(columns))
    (seen,) = group.updates
    assert "responses" not in seen.batch.keys()


@pytest.mark.parametrize("use_critic", [False, None])
def test_no_critic_is_asked_for_where_there_is_none(use_critic):
    """verl's trainer has the group in neither case."""

    def begin(trainer: Any) -> None:
        trainer.begin()
        del trainer.critic_wg

    for patch in (
        ray_trainer.init_workers_that_know_the_step,
        ray_trainer.init_workers_that_filter_truncated,
        ray_trainer.init_workers_that_finish_a_checkpoint,
    ):
        trainer = Trainer(use_critic=use_critic)
        if use_critic is None:
            del trainer.use_critic
        patch(begin, trainer)
        assert callable(trainer.actor_rollout_wg.update_actor)


@pytest.mark.parametrize("seed", [None, 5])
def test_requests_are_seeded_by_run_and_step(seed):
    """The rollout's own seed, 0 where verl has none, and the step; answers that go on keep the seeds that they had."""
    trainer = Trainer()
    trainer.config.actor_rollout_ref.rollout.seed = seed
    ray_trainer.init_workers_that_seed_requests(Trainer.begin, trainer)
    workers, own = trainer.actor_rollout_wg, Seeds(seed or 0, lambda: trainer.global_steps)
    for trainer.global_steps in (3, 4):
        workers.generate_sequences(prompts([1, 2]))
        assert workers.sent[-1].tolist() == own.draw(2).tolist()
    assert workers.sent[0].tolist() != workers.sent[1].tolist()
    going_on = prompts([1, 2])
    going_on.non_tensor_batch[ROWS] = np.array([0, 1], dtype=object)
    workers.generate_sequences(going_on)
    assert len(workers.sent) == 2


def test_correction_is_capped_by_its_setting(monkeypatch):
    chosen = {"overlay": {"rollout_correction": {"enabled": True, "cap": 3.0}}}
    monkeypatch.setattr(settings, "_current", OverlaySettings.from_config(chosen))
    ones = torch.ones(1, 2)
    columns = {"old_log_probs": ones * 0, "rollout_log_probs": ones * -5, "advantages": ones}
    output = SimpleNamespace(meta_info={"metrics": {}})
    seen: list[DataProto] = []
    trainer = Trainer()
    ray_trainer.init_workers_that_correct(
        lambda each: each.begin() or setattr(each.actor_rollout_wg, "update_actor", lambda b: seen.append(b) or output),
        trainer,
    )
    trainer.actor_rollout_wg.update_actor(
        DataProto.from_dict(columns | {"attention_mask": torch.ones(1, 3, dtype=torch.long)})
    )
    assert seen[0].batch["advantages"].tolist() == [[3.0, 3.0]]
