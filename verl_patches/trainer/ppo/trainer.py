"""The training loop: one step is `OverlayTrainer.train_step`, with a method for each stage. Features hook into the
stages by `middleware.MIDDLEWARE`.

It keeps the contract of verl's `RayPPOTrainer.fit`: the same calls of the workers in the same order, the same columns
and the same metrics. `ray_trainer` puts it in the place of verl's and checks the fingerprint of verl's loop.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pprint import pprint
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import OmegaConf
from tqdm import tqdm
from verl import DataProto
from verl.trainer.ppo import core_algos, metric_utils, reward
from verl.trainer.ppo import ray_trainer as verls
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils import tracking
from verl.utils.metric import reduce_metrics

from post_training.end_tokens import EndTokens
from verl_patches.features import settings
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.step import Collected, Rewards, Source, Step, Workers
from verl_patches.trainer.ppo.middleware import dress, in_force

Collate = Callable[[Sequence[Any]], Any]


def overlaid(trainer: type[RayPPOTrainer]) -> type[RayPPOTrainer]:
    """Return the overlay's class for a trainer of verl's class, or of a class that somebody derived from it."""
    if issubclass(trainer, OverlayTrainer):
        return trainer
    return OverlayTrainer if trainer is RayPPOTrainer else type(trainer.__name__, (trainer, OverlayTrainer), {})


class OverlayTrainer(RayPPOTrainer):
    """verl's trainer with a loop of short stages. source: collects the batch of every step."""

    source: Source

    # Before the first step -------------------------------------------------------------------------------------------

    def _create_dataloader(
        self, train_dataset: Any, val_dataset: Any, collate_fn: Collate | None, train_sampler: Any
    ) -> None:
        from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn

        from verl_patches.features.data_order.order import PlacedSampler
        from verl_patches.features.measure.run_files import RunFiles
        from verl_patches.trainer.ppo.sources import order_of, source_of

        sampler = PlacedSampler(lambda: order_of(self))  # verl's does not keep the epoch in which a resume begins
        super()._create_dataloader(train_dataset, val_dataset, collate_fn, sampler)
        self.source, self.train_dataloader = source_of(self, sampler, collate_fn or default_collate_fn)
        RunFiles(MEASURE.current().output_dir).note("data_ready")

    def init_workers(self) -> None:
        """Start the workers, and decorate their calls with the hooks of the features."""
        self.middleware = in_force()
        print(f"features of a step, from the workers outwards: {', '.join(e.feature.name for e in self.middleware)}")
        if self.has_foreign_loop:
            print(f"warning: {type(self).__name__} has its own loop, to whose log features add nothing")
        for each in self.middleware:
            each.before_workers(self)
        super().init_workers()
        dress(self, self.middleware)

    def _load_checkpoint(self) -> None:
        from verl_patches.features.training_checkpoint.trainer import resume_step

        resume_step(self, MEASURE.current().output_dir)

    def _save_checkpoint(self) -> None:
        from verl_patches.features.training_checkpoint.feature import writes_in_background
        from verl_patches.features.training_checkpoint.trainer import save_step

        current = settings.current()
        in_background = self.config.actor_rollout_ref.actor.strategy == "megatron" and writes_in_background(current)
        save_step(self, current.checkpoint, in_background)
        if self.has_foreign_loop:  # it never calls `publish_checkpoint`
            self.publish_checkpoint({})

    @property
    def has_foreign_loop(self) -> bool:
        """Whether a class that is derived from verl's has a loop of its own."""
        return type(self).fit is not OverlayTrainer.fit

    # The loop --------------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step, or until the prompts run out."""
        from verl_patches.features.dynamic_sampling.ending import end_early

        with ExitStack() as around:
            for each in reversed(self.middleware):
                around.enter_context(each.training(self))
            if self.begin():
                last, done = self.total_training_steps, self.global_steps - 1
                with tqdm(total=last, initial=done, desc="Training Progress") as progress:
                    while self.train_step():
                        progress.update(1)
                        self.global_steps += 1
                if self.source.ended_by is not None:
                    end_early(self, self.source.ended_by)

    def begin(self) -> bool:
        """Resume from a checkpoint if there is one, and validate; return whether there is anything to train."""
        options = self.config.trainer
        self.trackers = tracking.Tracking(
            project_name=options.project_name,
            experiment_name=options.experiment_name,
            default_backend=options.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        self.global_steps = 0
        self._load_checkpoint()
        if self.val_reward_fn is not None and options.get("val_before_train", True):
            metrics = self._validate()
            pprint(f"Initial validation metrics: {metrics}")
            self.log(metrics)
            if options.get("val_only", False):
                return False
        self.global_steps += 1
        return True

    def train_step(self) -> bool:
        """Run one step, from prompts to updated weights; return whether another one follows."""
        step = Step(self.global_steps, is_last=self.global_steps >= self.total_training_steps)
        with step.timed("step"):
            collected = self.collect_batch(step)
            if collected is None:
                return False
            batch = self.assemble(step, collected)
            with step.timed("reward"):
                scores = self.score(batch, collected)
            with step.timed("old_log_prob"):
                batch = self.old_log_probs(step, batch)
            batch = self.reference_log_probs(step, batch)
            batch = self.values(step, batch)
            with step.timed("adv"):
                batch = self.advantages(step, batch, scores)
            self.update(step, batch)
            self.dump_samples(step, batch)
            self.validate(step)
            self.save(step)
        self.log(self.metrics_of(step, batch, collected.epoch))
        return not step.is_last

    # Its stages ------------------------------------------------------------------------------------------------------

    def collect_batch(self, step: Step) -> Collected | None:
        """Collect prompts and their answers, with rewards if those decide which prompts are trained on."""
        group = self.actor_rollout_wg
        workers = Workers(
            group.generate_sequences, group.world_size, lambda answers: reward.compute_reward(answers, self.reward_fn)
        )
        return self.source.collect(step, workers)

    def assemble(self, step: Step, collected: Collected) -> DataProto:
        """Build the batch of all answers, ordered so that every rank gets about as many tokens."""
        prompts = collected.prompts
        if self.config.algorithm.adv_estimator == "remax":
            with step.timed("gen_max"):
                prompts.batch["reward_baselines"] = self.reward_baselines(collected)
        prompts.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(prompts))], dtype=object)
        batch = prompts.repeat(self.config.actor_rollout_ref.rollout.n, interleave=True).union(collected.answers)
        batch.batch["response_mask"] = verls.compute_response_mask(batch)
        if collected.rewards is not None:  # they are reordered with their answers
            tensor, further = collected.rewards
            batch.batch["token_level_scores"] = tensor
            batch.non_tensor_batch.update(_columns(further))
        if self.config.trainer.balance_batch:
            self._balance_batch(batch, metrics=step.metrics)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        return batch

    def reward_baselines(self, collected: Collected) -> torch.Tensor:
        """Return the reward of the greedy answer to each prompt: [prompts]."""
        asked = DataProto(collected.asked.batch, dict(collected.asked.non_tensor_batch), {"do_sample": False})
        answers = self.actor_rollout_wg.generate_sequences(asked)
        rewards = self.reward_fn(collected.prompts.union(answers)).sum(dim=-1)
        collected.prompts.pop(batch_keys=list(answers.batch.keys()))
        return rewards

    def score(self, batch: DataProto, collected: Collected) -> Callable[[], Rewards]:
        """Compute the rewards of the answers, or start to; return a function that returns them once they are there."""
        if collected.rewards is not None:
            from verl_patches.features.measure.samples import hold_samples

            further = {name: batch.non_tensor_batch.pop(name).tolist() for name in collected.rewards[1]}
            found = batch.batch.pop("token_level_scores"), further
            hold_samples(batch, found, getattr(self.reward_fn, "tokenizer", None))
            return lambda: found
        if self.use_rm:
            batch.union(self.rm_wg.compute_rm_score(batch))
        if self.config.reward_model.launch_reward_fn_async:
            future = reward.compute_reward_async.remote(batch, self.config, self.tokenizer)
            return lambda: ray.get(future)
        scored = reward.compute_reward(batch, self.reward_fn)
        return lambda: scored

    def old_log_probs(self, step: Step, batch: DataProto) -> DataProto:
        """Add the log-probs of the policy that sampled, unless the update takes its own."""
        if not settings.current().recompute_old_log_prob:
            return batch
        found = self.actor_rollout_wg.compute_log_prob(batch)
        mode, mask = self.config.actor_rollout_ref.actor.loss_agg_mode, batch.batch["response_mask"]
        entropy = core_algos.agg_loss(loss_mat=found.batch.pop("entropys"), loss_mask=mask, loss_agg_mode=mode)
        step.metrics["actor/entropy_loss"] = entropy.detach().item()
        batch = batch.union(found)
        if "rollout_log_probs" in batch.batch.keys():
            step.metrics.update(_distances(batch))
        return batch

    def reference_log_probs(self, step: Step, batch: DataProto) -> DataProto:
        """Add the log-probs of the reference policy, if there is one."""
        if not self.use_reference_policy:
            return batch
        in_actor = getattr(self, "ref_in_actor", False)
        with step.timed("ref"):
            group = self.actor_rollout_wg if in_actor else self.ref_policy_wg
            return batch.union(group.compute_ref_log_prob(batch))

    def values(self, step: Step, batch: DataProto) -> DataProto:
        """Add the critic's values, if there is one."""
        if not self.use_critic:
            return batch
        with step.timed("values"):
            return batch.union(self.critic_wg.compute_values(batch))

    def advantages(self, step: Step, batch: DataProto, scores: Callable[[], Rewards]) -> DataProto:
        """Add the advantage of every token, computed from the rewards."""
        options = self.config.algorithm
        batch.batch["token_level_scores"], step.scored = scores()
        batch.non_tensor_batch.update(_columns(step.scored))
        if options.use_kl_in_reward:
            controller = self.kl_ctrl_in_reward
            batch, metrics = verls.apply_kl_penalty(batch, kl_ctrl=controller, kl_penalty=options.kl_penalty)
            step.metrics.update(metrics)
        else:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        rollout = self.config.actor_rollout_ref.rollout
        return verls.compute_advantage(
            batch,
            adv_estimator=options.adv_estimator,
            gamma=options.gamma,
            lam=options.lam,
            num_repeat=rollout.n,
            norm_adv_by_std_in_grpo=options.get("norm_adv_by_std_in_grpo", True),
            multi_turn=rollout.multi_turn.enable,
            **_preference_feedback(options),
        )

    def update(self, step: Step, batch: DataProto) -> None:
        """Update the critic's weights and, after the critic's warm-up, the actor's."""
        if self.use_critic:
            with step.timed("update_critic"):
                output = self.critic_wg.update_critic(batch)
            step.metrics.update(reduce_metrics(output.meta_info["metrics"]))
        if self.config.trainer.critic_warmup <= step.number:
            batch.meta_info["multi_turn"] = self.config.actor_rollout_ref.rollout.multi_turn.enable
            with step.timed("update_actor"):
                output = self.actor_rollout_wg.update_actor(batch)
            step.metrics.update(reduce_metrics(output.meta_info["metrics"]))

    def dump_samples(self, step: Step, batch: DataProto) -> None:
        """Write every answer of the step into `trainer.rollout_data_dir`, if it is set."""
        folder = self.config.trainer.get("rollout_data_dir", None)
        if not folder:
            return
        with step.timed("dump_rollout_generations"):
            texts = (self.tokenizer.batch_decode(batch.batch[each], skip_special_tokens=True) for each in _TEXTS)
            scores = batch.batch["token_level_scores"].sum(-1).tolist()
            self._dump_generations(*texts, scores, step.scored, folder)

    def validate(self, step: Step) -> None:
        """Validate every `trainer.test_freq` steps, and at the last one."""
        if self.val_reward_fn is None or not _is_due(step, self.config.trainer.test_freq):
            return
        with step.timed("testing"):
            metrics = self._validate()
        step.metrics.update(metrics)
        if step.is_last:
            pprint(f"Final validation metrics: {metrics}")

    def save(self, step: Step) -> None:
        """Save a checkpoint every `trainer.save_freq` steps, and at the last one; `publish_checkpoint` names it."""
        if _is_due(step, self.config.trainer.save_freq):
            with step.timed("save_checkpoint"):
                self._save_checkpoint()

    def metrics_of(self, step: Step, batch: DataProto, epoch: int) -> dict[str, Any]:
        """Return all metrics of a step."""
        seconds, dies = step.seconds, self.resource_pool_manager.get_n_gpus()
        return {
            **step.metrics,
            "training/global_step": step.number,
            "training/epoch": epoch,
            **metric_utils.compute_data_metrics(batch=batch, use_critic=self.use_critic),
            **metric_utils.compute_timing_metrics(batch=batch, timing_raw=seconds),
            **metric_utils.compute_throughout_metrics(batch=batch, timing_raw=seconds, n_gpus=dies),
        }

    def log(self, metrics: dict[str, Any]) -> None:
        """Report a step to the trackers, and then publish its checkpoint."""
        self.trackers.log(data=metrics, step=self.global_steps)
        self.publish_checkpoint(metrics)

    def publish_checkpoint(self, metrics: Mapping[str, Any]) -> None:
        """Give the step's checkpoint, if it has one, its final name; a named checkpoint's step always has metrics."""
        from verl_patches.features.training_checkpoint.trainer import process_publisher

        process_publisher().logged(self.global_steps, metrics)

    def end_tokens(self) -> EndTokens:
        """Return the tokens that end an answer, the same as in the workers' engines."""
        from verl.utils.fs import copy_to_local

        from verl_patches.features.answer_ends.ends import end_tokens_of

        node = self.config.actor_rollout_ref
        return end_tokens_of(node.rollout, copy_to_local(node.model.path), self.tokenizer)


_TEXTS = ("prompts", "responses")


def _is_due(step: Step, every: int) -> bool:
    return every > 0 and (step.is_last or step.number % every == 0)


def _columns(further: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    return {name: np.array(values) for name, values in further.items()}


def _preference_feedback(options: Any) -> dict[str, Any]:
    """Return verl 0.4.0's options for reweighting a critic's batch; empty for the cluster's commit, which has none."""
    if "use_pf_ppo" not in options:
        return {}
    chosen = options.pf_ppo
    return {
        "use_pf_ppo": options.use_pf_ppo,
        "pf_ppo_reweight_method": chosen.reweight_method,
        "pf_ppo_weight_pow": chosen.weight_pow,
    }


def _distances(batch: DataProto) -> dict[str, float]:
    """Return how far the probabilities of rollout and training differ over answer tokens: max, mean and std."""
    columns = batch.batch
    counted = columns["attention_mask"][:, -columns["responses"].size(1) :].bool()
    distance = (columns["rollout_log_probs"].exp() - columns["old_log_probs"].exp()).abs()[counted]
    named = {"max": distance.max(), "mean": distance.mean(), "std": distance.std()}
    return {f"training/rollout_probs_diff_{name}": value.item() for name, value in named.items()}
