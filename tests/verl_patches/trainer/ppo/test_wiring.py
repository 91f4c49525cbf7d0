"""Features are wired correctly to the training loop, also with more ranks than engines and with a critic."""

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
from verl_patches.features.data_order.loader import NextPrompts
from verl_patches.features.first_placement.feature import FIRST_PLACEMENT
from verl_patches.features.learning_rate.feature import LEARNING_RATE
from verl_patches.features.learning_rate.rates import STEP
from verl_patches.features.overlong.feature import OVERLONG_FILTERING
from verl_patches.features.partial_rollout.columns import ROWS
from verl_patches.features.request_noise.feature import REQUEST_NOISE
from verl_patches.features.request_noise.seeds import SEED, Seeds
from verl_patches.features.rollout_correction.feature import ROLLOUT_CORRECTION
from verl_patches.features.sample_handles.feature import SAMPLE_HANDLES
from verl_patches.features.settings import OverlaySettings
from verl_patches.features.step import Step
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT
from verl_patches.features.training_checkpoint.kept_states import KeptStates
from verl_patches.trainer.ppo.middleware import MIDDLEWARE, dress
from verl_patches.trainer.ppo.trainer import OverlayTrainer

WIDTH = 16
LENGTHS = [9, 1, 12, 3, 7, 2, 15, 5]
"""Lengths of answers to eight prompts; two engines and four would deal them out in different orders."""


class Workers:
    """Workers whose answers are as long as the prompt's token says; they record what they are asked."""

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
    """The part of the trainer that features read: worker groups of actor, critic and reference policy."""

    def __init__(self, **changes: Any) -> None:
        rollout = {"tensor_model_parallel_size": 2}
        config = {"actor_rollout_ref": {"rollout": rollout, "model": {"path": "model"}}}
        given = {
            "config": OmegaConf.create(config),
            "global_steps": 3,
            "use_critic": True,
            "use_reference_policy": True,
        }
        groups = {f"{name}_wg": Workers() for name in ("actor_rollout", "critic", "ref_policy")}
        super().__init__(**given | groups | {"tokenizer": SimpleNamespace(eos_token_id=END)} | changes)

    def end_tokens(self) -> Any:
        return OverlayTrainer.end_tokens(self)


def dressed(*features: Any, **changes: Any) -> Trainer:
    """Return a trainer whose calls these features wrap."""
    trainer = Trainer(**changes)
    dress(trainer, [each for each in MIDDLEWARE if each.feature in features])
    return trainer


def prompts(lengths: list[int]) -> DataProto:
    tokens = torch.tensor(lengths)[:, None]
    return DataProto.from_dict({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})


def test_placement_counts_engines_and_not_ranks():
    """Four ranks at rollout TP 2 form two engines, each of which takes half of the batch."""
    two, four = (first_placement(LENGTHS, engines) for engines in (2, 4))
    assert two != four
    kept = "verl_patches.features.training_checkpoint.kept_states.process_kept_states"
    with mock.patch(kept, return_value=KeptStates()):
        workers = dressed(FIRST_PLACEMENT).actor_rollout_wg
    for _ in range(2):
        workers.generate_sequences(prompts(LENGTHS))
    assert workers.asked == [LENGTHS, [LENGTHS[place] for place in two]]


def test_sources_know_all_ranks_that_a_batch_is_cut_for():
    """verl deals a batch out to ranks, several of which form one engine."""
    given: list[Any] = []
    source = SimpleNamespace(collect=lambda step, workers: given.append(workers))
    trainer = Trainer(source=source)
    OverlayTrainer.collect_batch(trainer, Step(1))
    assert given[0].multiple == 4 and given[0].generate == trainer.actor_rollout_wg.generate_sequences


def test_next_prompts_are_those_of_all_epochs():
    """Epochs count from 0, and the prompts end with the last epoch."""
    rows = {name: torch.ones(2, 1) for name in ("input_ids", "attention_mask", "position_ids")}
    source, step = NextPrompts([rows, rows], epochs=2), Step(1)
    workers = SimpleNamespace(generate=lambda asked: sorted(asked.batch.keys()))
    found = [source.collect(step, workers) for _ in range(5)]
    assert [each and each.epoch for each in found] == [0, 0, 1, 1, None]
    assert found[0].answers == ["attention_mask", "input_ids", "position_ids"] and "gen" in step.seconds


def test_critic_knows_the_step_too():
    trainer = dressed(LEARNING_RATE)
    for group, update in ((trainer.actor_rollout_wg, "update_actor"), (trainer.critic_wg, "update_critic")):
        getattr(group, update)(SimpleNamespace(meta_info={}))
        assert [batch.meta_info for batch in group.updates] == [{STEP: 3}]


def test_critic_is_not_trained_on_cut_answers():
    batch = batch_of([4, 4, 2], last=[END, 5, END])
    with mock.patch("verl.utils.model.get_generation_config", return_value=None):
        trainer = dressed(OVERLONG_FILTERING)
        trainer.actor_rollout_wg.update_actor(batch)
        trainer.critic_wg.update_critic(batch)
    for group in (trainer.actor_rollout_wg, trainer.critic_wg):
        (seen,) = group.updates
        assert seen.batch["attention_mask"][:, -4:].any(-1).tolist() == [True, False, True]


def test_critic_waits_for_a_checkpoint_in_writing():
    order: list[str] = []

    def finishing_first(update: Any) -> Any:
        return lambda batch: order.append("finished") or update(batch)

    publisher = SimpleNamespace(finishing_first=finishing_first)
    with mock.patch("verl_patches.features.training_checkpoint.trainer.process_publisher", return_value=publisher):
        trainer = dressed(TRAINING_CHECKPOINT)
    trainer.actor_rollout_wg.update_actor("batch")
    trainer.critic_wg.update_critic("batch")
    assert order == ["finished"] * 2 and trainer.critic_wg.updates == ["batch"]


@pytest.mark.parametrize("in_actor", [False, True])
def test_reference_policy_gets_handles(in_actor):
    """With LoRA, the actor's workers also serve as the reference policy's."""
    with mock.patch("ray.put", lambda each: each):
        trainer = dressed(SAMPLE_HANDLES, ref_in_actor=in_actor)
        ones = torch.ones(1, 2, dtype=torch.int64)
        columns = {"responses": ones, "attention_mask": ones.repeat(1, 2)}
        columns |= {"sample_id": ones[:, 0], "sample_lengths": ones}
        group = trainer.actor_rollout_wg if in_actor else trainer.ref_policy_wg
        group.compute_ref_log_prob(DataProto.from_dict(columns))
    (seen,) = group.updates
    assert "responses" not in seen.batch.keys()


def test_no_critic_is_asked_for_where_there_is_none():
    """Without a critic, verl's trainer does not have this worker group."""
    trainer = Trainer(use_critic=False)
    del trainer.critic_wg
    dress(trainer, [each for each in MIDDLEWARE if each.feature in (LEARNING_RATE, TRAINING_CHECKPOINT)])
    trainer.actor_rollout_wg.update_actor(SimpleNamespace(meta_info={}))
    assert [batch.meta_info for batch in trainer.actor_rollout_wg.updates] == [{STEP: 3}]


@pytest.mark.parametrize("seed", [None, 5])
def test_requests_are_seeded_by_run_and_step(seed):
    """The seed comes from the rollout's seed (0 if verl has none) and the step; resumed answers keep their seeds."""
    trainer = Trainer()
    trainer.config.actor_rollout_ref.rollout.seed = seed
    trainer = dressed(REQUEST_NOISE, config=trainer.config)
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
    group = Workers()
    group.update_actor = lambda batch: seen.append(batch) or output
    trainer = dressed(ROLLOUT_CORRECTION, actor_rollout_wg=group)
    trainer.actor_rollout_wg.update_actor(
        DataProto.from_dict(columns | {"attention_mask": torch.ones(1, 3, dtype=torch.long)})
    )
    assert seen[0].batch["advantages"].tolist() == [[3.0, 3.0]]
