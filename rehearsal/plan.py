"""The plan of a rehearsal, worked out before anything starts. Needs nothing but the standard library."""

import hashlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from post_training.arguments import absolute
from post_training.chips import A2, A3
from post_training.environment_files import read_environment
from post_training.models.families import sizes_of
from post_training.overrides import setting
from rehearsal.jobs import DEFAULT_JOB, IMAGE_JOB, JOBS, Job
from rehearsal.kept_options import KeptOptions
from rehearsal.tiny_model.architecture import DEFAULT_MODEL_TYPE, TINY_MODELS, reads_images

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "outputs" / "rehearsal"
DEFAULT_TRAIN_DATA = ROOT / "data" / "arithmetic" / "train.jsonl"
DEFAULT_TEST_DATA = ROOT / "data" / "arithmetic" / "test.jsonl"
CHECKPOINT_SCRIPT = ROOT / "scripts" / "make_tiny_checkpoint.py"
REWARD = ROOT / "verl_patches" / "utils" / "reward" / "rule_reward.py"
ENVIRONMENT_FILE = ROOT / "scripts" / "env" / "rehearsal.env"
# For each value of --chip the family, and a chip of it by CANN's name.
CHIPS = {"a2": (A2, "Ascend910B3"), "a3": (A3, "Ascend910_9391")}
# The warm start does not depend on the run's seed: all seeds start from one cached checkpoint.
CHECKPOINT_SEED = 0


@dataclass(frozen=True)
class Options(KeptOptions):
    """The user's choices; None takes the job's value.

    ``job`` is a key of `JOBS`, ``model`` one of `TINY_MODELS`, ``chip`` one of `CHIPS`.
    """

    job: str = DEFAULT_JOB
    data: Path | None = None
    model: str | None = None
    steps: int | None = None
    seed: int = 1
    dies: int = JOBS[DEFAULT_JOB].dies
    device_memory_mb: int = 1024
    chip: str = "a3"
    stream_seed: int | None = None
    recipe: str = "grpo"
    output: Path | None = None
    overrides: tuple[str, ...] = ()
    resumes: bool = False

    @property
    def model_type(self) -> str:
        """The family of the tiny model."""
        return self.model or JOBS[self.job].model_type


@dataclass(frozen=True)
class RehearsalPlan:
    """Every path and command of one run. ``overrides`` are Hydra's, in the order in which they win.

    ``folder`` is the run's private one for temporary files; None before the run begins.
    """

    options: Options
    output: Path
    checkpoint: Path
    overrides: tuple[str, ...]
    folder: Path | None = None

    @property
    def job(self) -> Job:
        """The job that is rehearsed."""
        return job_of(self.options.job, self.options.model)

    @property
    def train_data(self) -> Path:
        """The parquet file to train on."""
        return self.output / "data" / "train.parquet"

    @property
    def test_data(self) -> Path:
        """The parquet file to validate on."""
        return self.output / "data" / "test.parquet"

    @property
    def log(self) -> Path:
        """Everything that the run's processes print."""
        return self.output / "logs" / "run.log"

    def checkpoint_command(self) -> list[str]:
        """Return the command that makes the tiny checkpoint with its tokenizer."""
        return [
            sys.executable,
            str(CHECKPOINT_SCRIPT),
            "--output",
            str(self.checkpoint),
            "--model-type",
            self.options.model_type,
            "--seed",
            str(CHECKPOINT_SEED),
        ]

    def data_command(self) -> list[str]:
        """Return the command that makes the two parquet files."""
        folder = str(self.output / "data")
        if reads_images(self.options.model_type):
            seed = str(self.options.seed)
            return [sys.executable, "-m", "rehearsal.make_image_task", "--output_dir", folder, "--seed", seed]
        command = [
            sys.executable,
            str(ROOT / "scripts" / "json_to_parquet.py"),
            "--output_dir",
            folder,
        ]
        if self.options.data is None:
            command += ["--json_path", str(DEFAULT_TRAIN_DATA), "--test_json_path", str(DEFAULT_TEST_DATA)]
            return [*command, "--data_source", DEFAULT_TRAIN_DATA.parent.name]
        return [*command, "--json_path", str(self.options.data), "--seed", str(self.options.seed)]

    def run_command(self) -> list[str]:
        """Return the command that trains."""
        return [sys.executable, "-m", "rehearsal.training", "--config-name", self.job.configuration, *self.overrides]

    def environment(self) -> dict[str, str]:
        """Return the variables that the run's commands get on top of the user's environment."""
        own = {
            **run_environment(self.overrides),
            "PYTHONPATH": _search_path(),
            "NPU_EMULATOR_CHIP": CHIPS[self.options.chip][1],
            "NPU_EMULATOR_DEVICES": str(self.options.dies),
            "NPU_EMULATOR_CAPACITY_MB": str(self.options.device_memory_mb),
            "NPU_EMULATOR_STREAM_SEED": "" if self.options.stream_seed is None else str(self.options.stream_seed),
            "NPU_EMULATOR_METERS": str(self.output / "meters"),
        }
        if self.folder is not None:
            # Dies of its own: other runs on this machine take none of their memory.
            own |= {"TMPDIR": str(self.folder), "NPU_EMULATOR_NODE": self.folder.name}
        return own

    def with_overrides(self, more: Iterable[str]) -> "RehearsalPlan":
        """Return the plan with further overrides; the user's own win against them."""
        own = len(self.overrides) - len(self.options.overrides)
        return replace(self, overrides=(*self.overrides[:own], *more, *self.options.overrides))


def job_of(name: str, model: str | None) -> Job:
    """Return the job ``name``, or the image job if the default job is given a model that reads images.

    ``model`` is the family of the tiny model, None for the job's own.
    """
    return JOBS[IMAGE_JOB if name == DEFAULT_JOB and model is not None and reads_images(model) else name]


def make_plan(options: Options, time_name: str) -> RehearsalPlan:
    """Works out a run; ``time_name`` names its folder unless the options say where to write."""
    output = absolute(options.output or RUNS / time_name)
    checkpoint = checkpoint_folder(checkpoint_key(options.model_type))
    plan = RehearsalPlan(options, output, checkpoint, ())
    own = [
        *plan.job.settings,
        setting("data.train_files", [plan.train_data]),
        setting("data.val_files", [plan.test_data]),
        setting("data.seed", options.seed),
        setting("actor_rollout_ref.model.path", checkpoint),
        setting("actor_rollout_ref.overlay.measure.output_dir", output),
        setting("custom_reward_function.path", REWARD),
        setting("trainer.n_gpus_per_node", options.dies),
        setting("trainer.default_local_dir", output / "checkpoints"),
    ]
    if plan.job.configuration == DEFAULT_JOB:
        own += _model_settings(options.model_type, options.dies)
    if options.recipe != Options.recipe:
        own.append(setting("+recipe", options.recipe))
    if options.resumes:
        own.append(setting("trainer.resume_mode", "auto"))
    if options.steps is not None:
        own.append(setting("trainer.total_training_steps", options.steps))
    return replace(plan, overrides=(*own, *options.overrides))


def _model_settings(model_type: str, dies: int) -> list[str]:
    """Return overrides that adapt the rehearsal's configuration, made for a model with experts, to this family."""
    values, megatron = TINY_MODELS[model_type], "actor_rollout_ref.actor.megatron"
    spread = "actor_rollout_ref.overlay.rollout.expert_parallel_size"
    settings = [] if model_type == DEFAULT_MODEL_TYPE else [setting("trainer.experiment_name", f"{model_type}-tiny")]
    if sizes_of(values).experts:
        return [*settings, setting(spread, dies)]
    # Without experts to spread, each tensor-parallel group of dies is a rollout instance. verl builds these models
    # itself: their stages are equally long, and their Megatron configuration does not have these two fields.
    transformer = f"{megatron}.override_transformer_config"
    settings += [setting(spread, 1), f"~{transformer}.num_layer_list", f"~{transformer}.moe_tp_extend_ep"]
    odd = values["num_hidden_layers"] % 2
    return [*settings, setting(f"{megatron}.pipeline_model_parallel_size", 1)] if odd else settings


def _search_path() -> str:
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join(dict.fromkeys([str(ROOT), *inherited]))


def checkpoint_folder(key: str, root: Path = ROOT) -> Path:
    """Return the folder of the tiny checkpoint with this key: in the checkout, which other users may share.

    A user without write access there uses a checkpoint that exists there, and keeps the others in a cache of their own.
    """
    shared = root / ".cache" / "checkpoints"
    existing = next(folder for folder in (shared, *shared.parents) if folder.exists())
    if _is_readable(shared / key) or os.access(existing, os.W_OK | os.X_OK):
        return shared / key
    own = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own, "rehearsal", "checkpoints", key)


def _is_readable(folder: Path) -> bool:
    """Whether this user can read all files of a folder, if it is there."""
    return os.access(folder, os.R_OK | os.X_OK) and all(os.access(file, os.R_OK) for file in folder.iterdir())


def checkpoint_key(model_type: str) -> str:
    """Return a hash of everything that the tiny checkpoint of a family is made from."""
    sources = [CHECKPOINT_SCRIPT, ROOT / "rehearsal" / "image_task.py"]
    sources += sorted((ROOT / "rehearsal" / "tiny_model").glob("*.py"))
    sources += [DEFAULT_TRAIN_DATA, ROOT / "requirements" / "runtime.lock"]
    digest = hashlib.sha256(f"{model_type} {CHECKPOINT_SEED}".encode())
    for path in sources:
        digest.update(path.name.encode() + (path.read_bytes() if path.exists() else b""))
    return digest.hexdigest()[:16]


def run_environment(overrides: Iterable[str]) -> dict[str, str]:
    """Return the variables of `ENVIRONMENT_FILE` for a run with these overrides.

    On an NPU, kernels that take 16 bits only reject float32. A float32 run is a reference and uses them all the same.
    """
    environment = read_environment(ENVIRONMENT_FILE)
    if "actor_rollout_ref.overlay.precision=float32" in overrides:
        environment["NPU_EMULATOR_STRICT"] = "float32"
    return environment
