"""A job scaled down to emulated dies, to prove its resume and to export and evaluate its last checkpoint."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from post_training.report.run_folder import at, read_configuration
from rehearsal.plan import ROOT
from rehearsal.resume_proof.comparison import metrics_of
from rehearsal.resume_proof.runs import STEPS

_MODEL, _CHECKPOINTS = "actor_rollout_ref.model.path", "trainer.default_local_dir"
# Keys of the place where a job runs and of its length: scaled down it has its own model, data, dies and few steps.
PLACES = (
    _MODEL, _CHECKPOINTS, "data.train_files", "data.val_files", "actor_rollout_ref.overlay.measure.output_dir",
    "actor_rollout_ref.actor.megatron.load_from_hf", "ray_init.address", "trainer.nnodes", "trainer.n_gpus_per_node",
    "data.train_batch_size", "data.gen_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size",
    "trainer.total_training_steps", "trainer.total_epochs", "trainer.save_freq", "trainer.test_freq",
    "trainer.val_before_train", "trainer.logger", "trainer.resume_mode", "trainer.resume_from_path",
    "actor_rollout_ref.overlay.checkpoint.keep_last", "actor_rollout_ref.overlay.watch.enabled",
)  # fmt: skip
_QUESTIONS, _VALIDATION = 8, "val-"


def validation_metrics(run: Path, step: int) -> dict[str, Any]:
    """Return the metrics of a step's validation by name; none if it did not run."""
    return {name: value for name, value in metrics_of(run)[step].items() if name.startswith(_VALIDATION)}


class TrainedJob:
    """A scaled-down job that has trained: its last checkpoint is exported and evaluated.

    Attributes:
        stack: versions of upstream.
        last_step: the step of the checkpoint, after which the run validated.
        reward_key: the configuration's key of the reward function.
        folder: for all output.
    """

    stack: ClassVar[str]
    last_step: ClassVar[int]
    reward_key: ClassVar[str]
    folder: Path

    @property
    def run(self) -> Path:
        """The run that was not killed."""
        return self.folder / "unbroken"

    @property
    def questions(self) -> Path:
        """The parquet file of the problems on which the run validates."""
        raise NotImplementedError

    def validated(self) -> dict[str, Any]:
        """Return the metrics of the last step's validation."""
        return validation_metrics(self.run, self.last_step)

    def export(self) -> list[str]:
        """Return the command that exports the last checkpoint as a HuggingFace folder."""
        checkpoint = self.run / "checkpoints" / f"global_step_{self.last_step}"
        return [sys.executable, str(ROOT / "scripts" / "export_hf.py"), str(checkpoint), str(self._exported)]

    def evaluation(self) -> list[str]:
        """Return the command that evaluates the export by the run's reward function."""
        config = read_configuration(self.run)
        length = at(config, "data.max_response_length")
        command = [sys.executable, str(ROOT / "scripts" / "evaluate.py"), "--emulate", "--stack", self.stack]
        command += ["--model", str(self._exported), "--data", str(self.questions)]
        command += ["--n", "2", "--max-tokens", str(length), *self._more(config)]
        path, function, given = (at(config, f"{self.reward_key}.{name}") for name in ("path", "name", "reward_kwargs"))
        # evaluate.py hands no arguments on; with some it takes the rule reward.
        own = ["--reward", f"{path}:{function}"] if path and not given else []
        return [*command, *own, "--output", str(self.evaluated)]

    def _more(self, config: Mapping[str, Any]) -> list[str]:
        """Return further arguments of evaluate.py."""
        raise NotImplementedError

    def forget(self) -> None:
        """Remove an earlier preflight's export and evaluation; its runs stay, since they are not repeated."""
        for folder in (self._exported, self.evaluated):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def evaluated(self) -> Path:
        """The folder of the evaluation."""
        return self.folder / "evaluation"

    @property
    def _exported(self) -> Path:
        return self.folder / "exported"


@dataclass(frozen=True)
class ScaledDownJob(TrainedJob):
    """A job scaled down to emulated dies.

    Attributes:
        config_name: a file of `verl_patches/trainer/config`.
        overrides: the job's own, without those of `PLACES`.
        folder: for all output; the run that is not killed is in `unbroken`.
    """

    config_name: str
    overrides: tuple[str, ...]
    folder: Path

    stack = "2025"
    last_step = STEPS
    reward_key = "custom_reward_function"

    @classmethod
    def of_job(cls, config_name: str, given: Sequence[str], folder: Path) -> "ScaledDownJob":
        """Scale down a job with these overrides."""
        kept = tuple(word for word in given if word.lstrip("+~").partition("=")[0] not in PLACES)
        return cls(config_name, kept, folder)

    @property
    def questions(self) -> Path:
        """As in `TrainedJob`; the proof's runs share their data."""
        return self.folder / "data" / "test.parquet"

    def proof(self) -> list[str]:
        """Return the command that proves a resume with one kill; the run's last step validates."""
        command = [sys.executable, str(ROOT / "scripts" / "prove_resume.py"), "--config-name", self.config_name]
        return [*command, "--points", "1", "--output", str(self.folder), *self.overrides, f"trainer.test_freq={STEPS}"]

    def _more(self, config: Mapping[str, Any]) -> list[str]:
        return ["--limit", str(_QUESTIONS)]
