"""verl's synchronous trainer without the forward for old log-probs, registered as `sync_onpolicy`."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from post_training.report.run_error import RunError
from verl_plugin.heartbeats.settings import hang_problems
from verl_plugin.heartbeats.trainer import DetectsHangs
from verl_plugin.libraries import libraries_of
from verl_plugin.onpolicy.checks import ENGINES, onpolicy_problems
from verl_plugin.rollout.trainer import ServesWindows
from verl_plugin.step_record.checks import record_problems
from verl_plugin.step_record.trainer import RecordsSteps
from verl_plugin.trainer_modes import MODE_KEY, ONE_FORWARD

_OF_UPDATE = "actor/"
"""verl puts this before every metric that an update returns."""
_ELSEWHERE = ("training/", "rollout_corr/")


@register_trainer(ONE_FORWARD)
class OnPolicyTrainer(ServesWindows, DetectsHangs, RecordsSteps, PPOTrainerSync):
    """Makes one update of each batch; the update's own forward has the old log-probs.

    Metrics that verl computes from old log-probs come from the update, under their usual names.
    """

    def __init__(self, config: DictConfig) -> None:
        """Check the configuration, and change it to one of `sync` with this project's engines.

        Raises:
            ValueError: the update's own log-probs cannot serve as old ones in this run, or another key is invalid.
        """
        plain: Any = OmegaConf.to_container(config, resolve=True)
        for problem in (*onpolicy_problems(plain), *record_problems(plain), *hang_problems(plain)):
            raise ValueError(problem)
        libraries = libraries_of(plain)
        with open_dict(config):
            # verl decides several things by the name of its synchronous mode; they apply here too.
            config.trainer.v1.trainer_mode = "sync"
            # Without weights and rejection it only computes metrics of old log-probs, which come from the update.
            config.algorithm.rollout_correction = None
            if ENGINES not in libraries:
                config.actor_rollout_ref.model.external_lib = [*libraries, ENGINES]
        super().__init__(config)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute nothing: the update has them."""
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """As upstream, for a batch that makes one update.

        Raises:
            RunError: the batch has another size than one update, for example because an agent loop returned several
                samples of an answer.
        """
        answers = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        if len(batch) != answers:
            raise RunError(
                f"{MODE_KEY}={ONE_FORWARD} is invalid: a batch has {len(batch)} samples, but one update {answers}, "
                f"because an agent loop returns several samples of an answer. Set {MODE_KEY} to sync.",
                "not_valid",
            )
        batch = super()._update_actor(batch, metrics)
        for name in [name for name in metrics if name.removeprefix(_OF_UPDATE).startswith(_ELSEWHERE)]:
            metrics[name.removeprefix(_OF_UPDATE)] = metrics.pop(name)
        return batch
