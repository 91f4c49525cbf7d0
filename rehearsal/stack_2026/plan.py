"""The plan of a rehearsal of the stack of 2026, worked out before anything starts.

Needs nothing but the standard library. Keys are verl's own; those not set here keep verl's defaults.
"""

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from post_training.arguments import absolute
from post_training.environment_files import read_environment
from post_training.models.families import sizes_of
from post_training.overrides import quoted, setting
from rehearsal.kept_options import KeptOptions
from rehearsal.plan import (
    CHECKPOINT_SCRIPT,
    CHECKPOINT_SEED,
    DEFAULT_TEST_DATA,
    DEFAULT_TRAIN_DATA,
    REWARD,
    ROOT,
    RUNS,
    checkpoint_folder,
)
from rehearsal.stack_2026.jobs import JOBS, scaled_down
from rehearsal.tiny_model.architecture import TINY_MODELS, reads_images
from verl_plugin.alltoallv.settings import BACKEND, BACKEND_MODULE
from verl_plugin.heartbeats.settings import ENGINES as HEARTBEATS
from verl_plugin.heartbeats.settings import KEY as HANG_DETECTION
from verl_plugin.offload import LIBRARY as OFFLOAD
from verl_plugin.resume.checks import ENGINES as RESUME
from verl_plugin.resume.checks import KEYS as RESUME_KEYS
from verl_plugin.resume.checks import SAMPLER
from verl_plugin.rollout import BACKEND as ALL2ALL
from verl_plugin.rollout import BACKEND_KEY as ALL2ALL_KEY
from verl_plugin.rollout import WORKER, WORKER_KEY
from verl_plugin.trainer_modes import MODE_KEY, MODULES, MODULES_KEY, ONE_FORWARD, REGISTRATION, SEPARATE

ENVIRONMENT_FILE = ROOT / "scripts" / "env" / "rehearsal_2026.env"
JOB_FOLDER = ROOT / "verl_plugin" / "config"
MODELS = ("deepseek_v3", "qwen3", "qwen3_moe", "qwen2_5_vl")
BACKENDS = ("megatron", "mindspeed", "fsdp2")
PRECISIONS = ("float32", "bfloat16")
WEIGHTS = ("alltoallv", "naive")
# Functions that the model may call, by the file in which verl finds them.
TOOLS = {"calculator": ROOT / "verl_plugin" / "tools" / "calculator.py"}
# Changes of the tiny model with which rollout and training compute the same. vLLM-Ascend 0.23's kernels take latent
# attention as wide as published alone. Its kernel for routers scores a group by the two best experts, as DeepSeek-V3
# does; it is called where hidden size / (groups * chosen groups) is at least the experts of a token, and elsewhere a
# group is scored by the best one. Megatron-core scores it by (experts of a token / chosen groups) of them.
CHANGES = {
    "deepseek_v3": {
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "topk_group": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
DATASET = "arithmetic"
PEAKS = "verl_plugin.phase_peaks"
# The module with mbridge's bridges for the layers of a backend.
_BRIDGES = {"megatron": "megatron_core", "mindspeed": "mindspeed"}
_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
# verl's trainer looks every two seconds whether all answers are there; here they take three.
_ANSWERS_INTERVAL_S = 0.1
# Samples carry the rollout's experts, and training uses them: docs/routing-replay.md.
ROUTING_REPLAY = f"{_ROLLOUT}.enable_rollout_routing_replay=true"
_REPLAYED = tuple(f"{part}.megatron.router_replay.mode=R3" for part in (_ACTOR, _REF))


@dataclass(frozen=True)
class Options(KeptOptions):
    """The user's choices. ``model`` is one of `MODELS`, ``backend`` one of `BACKENDS`; ``dies`` are emulated.

    ``weights`` is how they reach the rollout, one of `WEIGHTS`: by this project's plugin or by verl's own way.
    ``precision`` is the type in which training and rollout compute, one of `PRECISIONS`. ``job`` is a configuration of
    `verl_plugin/config` to scale down, which decides how weights move; None for the rehearsal's own job. ``tool`` is
    one of `TOOLS`, which the model calls before it answers; None for one turn without. ``rollout_dies`` are those of
    ``dies`` that only generate, beside training (verl's `separate_async`); 0 where both take turns on all of them.
    """

    model: str = "deepseek_v3"
    backend: str = "megatron"
    steps: int = 25
    seed: int = 1
    dies: int = 4
    device_memory_mb: int = 1024
    precision: str = "float32"
    weights: str = "alltoallv"
    output: Path | None = None
    overrides: tuple[str, ...] = ()
    data: Path | None = None
    job: str | None = None
    tool: str | None = None
    rollout_dies: int = 0
    resumes: bool = False

    @property
    def training_dies(self) -> int:
        """The number of dies that train."""
        return self.dies - self.rollout_dies


@dataclass(frozen=True)
class Rehearsal2026Plan:
    """Every path and command of one run.

    ``folder`` is its private one for temporary files; None before it begins. ``resumed`` is the folder of the step
    behind which it goes on; None from step 1.
    """

    options: Options
    output: Path
    checkpoint: Path
    folder: Path | None = None
    resumed: Path | None = None

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

    @property
    def upstream_metrics(self) -> Path:
        """The file that verl's own file logger writes."""
        return self.output / "verl_metrics.jsonl"

    @property
    def composed(self) -> Path:
        """The composed configuration as Hydra writes it."""
        return self.output / "hydra" / ".hydra" / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints: the user's, or one in the run's own folder."""
        given = self.options.given("trainer.default_local_dir")
        return absolute(given) if given else self.output / "checkpoints"

    @property
    def steps(self) -> int:
        """The number of training steps: the user's key wins against the option."""
        given = self.options.given("trainer.total_training_steps")
        return int(given) if given and given.isdecimal() else self.options.steps

    def checkpoint_command(self) -> list[str]:
        """Return the command that makes the tiny checkpoint with its tokenizer."""
        command = [sys.executable, str(CHECKPOINT_SCRIPT), "--output", str(self.checkpoint)]
        command.append("--published-end")
        command += ["--calls-tool"] if self.options.tool else []
        for key, value in changes_of(self.options).items():
            command += ["--set", f"{key}={value}"]
        return [*command, "--model-type", self.options.model, "--seed", str(CHECKPOINT_SEED)]

    def data_command(self) -> list[str]:
        """Return the command that makes the two parquet files."""
        if reads_images(self.options.model):
            seed, folder = str(self.options.seed), str(self.output / "data")
            return [sys.executable, "-m", "rehearsal.make_image_task", "--output_dir", folder, "--seed", seed]
        command = [sys.executable, str(ROOT / "scripts" / "json_to_parquet.py"), "--data_source", DATASET]
        if self.options.data is None:
            command += ["--json_path", str(DEFAULT_TRAIN_DATA), "--test_json_path", str(DEFAULT_TEST_DATA)]
        else:
            command += ["--json_path", str(self.options.data), "--seed", str(self.options.seed)]
        return [*command, "--output_dir", str(self.output / "data")]

    def run_command(self) -> list[str]:
        """Return the command that trains."""
        own = [*self.overrides(), *resuming(self.resumed)]
        return [sys.executable, "-m", "rehearsal.stack_2026.training", *own, *self.options.overrides]

    def overrides(self) -> Iterator[str]:
        """Hydra overrides of verl's own configuration; those of the user come after them and win."""
        options = self.options
        if options.job is not None:
            yield from (f"--config-path={JOB_FOLDER}", f"--config-name={options.job}")
        elif options.backend != "fsdp2":
            yield from ("--config-path=config", "--config-name=ppo_megatron_trainer.yaml")
        yield from _paths(self)
        if options.job is None:
            yield from _task(options)
            yield from _rollout(options)
            yield from () if options.tool is None else _tool(TOOLS[options.tool])
            yield from _images() if reads_images(options.model) else ()
            yield from _fsdp(options) if options.backend == "fsdp2" else _megatron(options)
            yield from _plugins(options)
            yield from _separate(options) if options.rollout_dies else resumable(options.backend)
        else:
            yield "reward.custom_reward_function.name=compute_score"
            own_layers = options.backend == "mindspeed"
            yield from scaled_down(JOBS[options.job], options.steps, options.seed, options.dies, own_layers)
        if not self.options.rollout_dies:  # verl's own buffer has no key for it
            yield f"+{SAMPLER}.sampler_kwargs.poll_interval={_ANSWERS_INTERVAL_S}"
        yield from _processes(self)

    def environment(self) -> dict[str, str]:
        """Return the variables that the run's commands get on top of the user's environment."""
        inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        own = {
            **read_environment(ENVIRONMENT_FILE),
            "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), *inherited])),
            # verl starts npu-smi, which is in the folder of this Python.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            # Operators reject arguments that their documents forbid, and collectives complete at wait() only.
            "NPU_EMULATOR_STRICT": "float32" if self.options.precision == "float32" else "1",
            "NPU_EMULATOR_DEFERRED_COLLECTIVES": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asserts it
            # verl asks npu-smi for card 1 or, if there is none, for the first of these.
            "ASCEND_VISIBLE_DEVICES": ",".join(map(str, range(self.options.dies))),
            "NPU_EMULATOR_DEVICES": str(self.options.dies),
            "NPU_EMULATOR_CAPACITY_MB": str(self.options.device_memory_mb),
            "NPU_EMULATOR_METERS": str(self.output / "meters"),
            "VERL_FILE_LOGGER_PATH": str(self.upstream_metrics),
        }
        if modules := self.options.given(MODULES_KEY):
            # verl loads them when it is imported: for forked workers, before Ray gives them the key.
            own[MODULES] = modules
        if self.options.rollout_dies:
            # Else verl ends at a line of its log: docs/upstream/verl-separate-async-logging.md.
            own["VERL_LOGGING_LEVEL"] = "WARN"
        if self.options.backend == "mindspeed":
            # MindSpeed looks for a name in every module, and transformers warns of each that it then loads.
            own["TRANSFORMERS_VERBOSITY"] = "error"
        if self.folder is not None:
            # Dies of its own: other runs on this machine take none of their memory.
            own |= {"TMPDIR": str(self.folder), "NPU_EMULATOR_NODE": self.folder.name}
        return own


def make_plan(options: Options, time_name: str) -> Rehearsal2026Plan:
    """Works out a run; ``time_name`` names its folder unless the options say where to write."""
    return Rehearsal2026Plan(
        options, absolute(options.output or RUNS / time_name), checkpoint_folder(checkpoint_key(options))
    )


def changes_of(options: Options) -> Mapping[str, int | str]:
    """Return values that differ from the tiny model's own config.json."""
    if options.job is None:
        return CHANGES.get(options.model, {})
    job = JOBS[options.job]
    return {**CHANGES.get(job.model, {}), **job.changes}


def checkpoint_key(options: Options) -> str:
    """Return a hash of everything that the tiny checkpoint is made from, including the libraries of this stack."""
    sources = [CHECKPOINT_SCRIPT, *sorted((ROOT / "rehearsal" / "tiny_model").glob("*.py")), DEFAULT_TRAIN_DATA]
    sources += [ROOT / "requirements" / "2026" / "runtime.lock"]
    sources += [ROOT / "rehearsal" / "image_task.py"] if reads_images(options.model) else []
    tool = " calls a tool" if options.tool else ""
    digest = hashlib.sha256(f"2026 {options.model} {changes_of(options) or None} {CHECKPOINT_SEED}{tool}".encode())
    for path in sources:
        digest.update(path.name.encode() + (path.read_bytes() if path.exists() else b""))
    return digest.hexdigest()[:16]


def _paths(plan: Rehearsal2026Plan) -> Iterator[str]:
    yield setting("data.train_files", plan.train_data)
    yield setting("data.val_files", plan.test_data)
    yield setting("actor_rollout_ref.model.path", plan.checkpoint)
    yield setting("reward.custom_reward_function.path", REWARD)
    yield setting("trainer.default_local_dir", plan.checkpoints)
    yield setting("hydra.run.dir", plan.composed.parents[1])


def _task(options: Options) -> Iterator[str]:
    """Yield the keys for GRPO on 32 exercises a step, with the sizes of the rehearsal of 2025."""
    yield from ("algorithm.adv_estimator=grpo", "reward.custom_reward_function.name=compute_score")
    yield from ("data.train_batch_size=32", "data.max_prompt_length=16", "data.max_response_length=10")
    yield from ("data.dataloader_num_workers=0", f"data.seed={options.seed}", f"{_ACTOR}.ppo_mini_batch_size=32")
    yield from (f"{_ACTOR}.ppo_micro_batch_size_per_gpu=64", f"{_REF}.log_prob_micro_batch_size_per_gpu=64")
    yield from (
        f"{_ACTOR}.use_kl_loss=true",
        f"{_ACTOR}.kl_loss_coef=0.001",
        f"{_ACTOR}.data_loader_seed={options.seed}",
    )
    yield from (f"{_ACTOR}.optim.lr=2e-4", f"{_ACTOR}.optim.clip_grad=1.0", f"{_ACTOR}.optim.weight_decay=0.01")
    yield from ("trainer.logger=[console,file]", "trainer.val_before_train=false", "trainer.save_freq=-1")
    yield from ("trainer.total_epochs=1000", f"trainer.total_training_steps={options.steps}")
    yield from ("trainer.project_name=rehearsal", f"trainer.experiment_name={options.model}-tiny")
    yield from ("trainer.resume_mode=disable", "trainer.nnodes=1", f"trainer.n_gpus_per_node={options.training_dies}")
    # A batch makes one update, whose own forward has the old log-probs: docs/algorithms.md.
    yield f"{MODE_KEY}={ONE_FORWARD}"


def _rollout(options: Options) -> Iterator[str]:
    """Yield the keys for vLLM instances of two dies, or of one if there is only one; they sleep during the update."""
    yield from (f"{_ROLLOUT}.name=vllm", f"{_ROLLOUT}.n=8", f"{_ROLLOUT}.dtype={options.precision}")
    yield from (f"{_ROLLOUT}.seed={options.seed}", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu=64")
    instance = options.rollout_dies or options.dies
    yield f"{_ROLLOUT}.tensor_model_parallel_size={2 if instance % 2 == 0 else 1}"
    yield from (f"{_ROLLOUT}.gpu_memory_utilization=0.5", f"{_ROLLOUT}.enforce_eager=true")
    yield from (f"{_ROLLOUT}.max_model_len=32", f"{_ROLLOUT}.max_num_seqs=128", f"{_ROLLOUT}.calculate_log_probs=true")
    yield from (
        f"{_ROLLOUT}.max_num_batched_tokens=2048",
        f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=16",
    )
    # Enough for every sequence in flight: clearing the cache takes a host's time here.
    yield f"+{_ROLLOUT}.engine_kwargs.vllm.num_gpu_blocks_override=256"
    yield from (f"+{WORKER_KEY}={WORKER}", f"+{ALL2ALL_KEY}={ALL2ALL}")


def _tool(file: Path) -> Iterator[str]:
    """Yield the keys for two turns: a call, to which verl appends the result, and the answer; lengths count it all."""
    turns = f"{_ROLLOUT}.multi_turn"
    yield from (f"{_ROLLOUT}.agent.default_agent_loop=tool_agent", f"{turns}.enable=true", f"{turns}.format=hermes")
    yield from (setting(f"{turns}.function_tool_path", file), f"{turns}.max_assistant_turns=2")
    yield from ("data.max_prompt_length=24", "data.max_response_length=32", f"{_ROLLOUT}.max_model_len=64")


def _images() -> Iterator[str]:
    """Yield the keys for prompts of 14 tokens, four of them an image's, and answers of one word."""
    yield from ("data.image_key=images", "data.max_response_length=6")
    # Attention in packed batches computes in 16 bits: docs/new-in-2026.md.
    yield "actor_rollout_ref.model.use_remove_padding=false"


def _separate(options: Options) -> Iterator[str]:
    """Yield the keys with which generation goes on during the update, which trains on samples of the step before.

    Weights are sent to the other dies.
    """
    yield from (f"{MODE_KEY}={SEPARATE}", "actor_rollout_ref.hybrid_engine=false")
    yield from (f"{_ROLLOUT}.nnodes=1", f"{_ROLLOUT}.n_gpus_per_node={options.rollout_dies}")
    yield from ("trainer.v1.separate_async.parameter_sync_step=1", f"{_ROLLOUT}.checkpoint_engine.backend={BACKEND}")
    yield f"{_ROLLOUT}.checkpoint_engine.custom_backend_module={BACKEND_MODULE}"


def _fsdp(options: Options) -> Iterator[str]:
    yield f"{_ACTOR}.strategy=fsdp2"
    for part in (_ACTOR, _REF):
        # inductor's kernels are compiled for a device's cores.
        yield from (f"{part}.use_torch_compile=false", f"{part}.fsdp_config.use_torch_compile=false")
        yield from (f"{part}.fsdp_config.dtype={options.precision}", f"{part}.fsdp_config.seed={options.seed}")
        types = f"{{param_dtype:{options.precision},reduce_dtype:float32,buffer_dtype:float32}}"
        yield f"+{part}.fsdp_config.mixed_precision={types}"
    yield from _leaving(options, "fsdp_config")


def _megatron(options: Options) -> Iterator[str]:
    """Yield the keys that spread experts over all training dies and replicate everything else on each."""
    yield from (f"{_ACTOR}.use_torch_compile=false", f"{_ACTOR}.megatron.vanilla_mbridge=true")
    # Megatron-core's own attention takes padded batches, MindSpeed's packed ones; verl's workers give the engine the
    # model's key.
    packed = str(options.backend == "mindspeed").lower()
    yield from (
        f"actor_rollout_ref.model.use_remove_padding={packed}",
        f"{_ACTOR}.megatron.use_remove_padding={packed}",
    )
    yield f"{_ACTOR}.megatron.seed={options.seed}"
    yield from (f"{part}.megatron.dtype=bfloat16" for part in (_ACTOR, _REF))
    if sizes_of(TINY_MODELS[options.model]).experts:
        yield f"{_ACTOR}.megatron.expert_model_parallel_size={options.training_dies}"
    yield from _leaving(options, "megatron")


def _leaving(options: Options, group: str) -> Iterator[str]:
    """Yield the keys that offload training's state from dies on which the rollout generates too."""
    if not options.rollout_dies:
        yield from (f"{_ACTOR}.{group}.{part}_offload=true" for part in ("param", "optimizer"))


def _plugins(options: Options) -> Iterator[str]:
    """Yield the keys that load this project's modules in every process that reads the model's configuration."""
    modules = [RESUME]
    if options.backend != "fsdp2":
        modules.append(f"verl_plugin.{_BRIDGES[options.backend]}")
        if options.precision == "float32":
            # verl's key of the type has no float32: the module decides.
            modules.append("verl_plugin.megatron_float32")
        modules.append("verl_plugin.finite_steps")
    if options.weights == "alltoallv":
        modules.append("verl_plugin.alltoallv.engines")
        vllm = f"+{_ROLLOUT}.engine_kwargs.vllm"
        yield f"{vllm}.worker_extension_cls=verl_plugin.alltoallv.worker.AlltoallvExtension"
        # Every update is compared bit for bit, which a job of full size would not do.
        yield f"{vllm}.additional_config={{alltoallv:{{bucket_megabytes:16,verify:true}}}}"
    # If two experts score alike, rounding may choose another one in training than in the rollout.
    replayed = options.backend == "megatron" and sizes_of(TINY_MODELS[options.model]).experts
    if replayed:
        yield from (ROUTING_REPLAY, *_REPLAYED)
    if replayed or ROUTING_REPLAY in options.overrides:
        modules.append("verl_plugin.routing_replay.engines")
    # Behind alltoallv, whose export calls none before it.
    modules += [HEARTBEATS, PEAKS]
    if not options.rollout_dies:
        modules.append(OFFLOAD)
    yield f"+{HANG_DETECTION}.enabled=true"
    yield f"actor_rollout_ref.model.external_lib=[{','.join(modules)}]"


def resumable(backend: str) -> Iterator[str]:
    """Yield the keys with which a run is resumed bit for bit: docs/checkpoints.md."""
    # verl's files do not have every key that verl reads.
    yield from (f"++{key}={value}" for key, value in RESUME_KEYS.items())
    yield "data.validation_shuffle=false"
    if backend == "megatron":
        yield f"{_ACTOR}.optim.use_checkpoint_opt_param_scheduler=true"
        yield f"{_ACTOR}.megatron.dist_ckpt_optim_fully_reshardable=true"


def resuming(folder: Path | None) -> Iterator[str]:
    """Yield verl's keys to resume after the step in a folder, which is known to be complete."""
    if folder is not None:
        yield "trainer.resume_mode=resume_path"
        yield setting("trainer.resume_from_path", folder)


def _processes(plan: Rehearsal2026Plan) -> Iterator[str]:
    """Yield the keys for few processes, on a machine with few cores. Ray counts logical slots, not cores."""
    yield from (f"{_ROLLOUT}.agent.num_workers=1", "reward.num_workers=1")
    yield "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"
    yield from (
        f"ray_kwargs.ray_init.num_cpus={4 * plan.options.dies + 8}",
        "+ray_kwargs.ray_init.include_dashboard=false",
    )
    yield "+ray_kwargs.ray_init.object_store_memory=500000000"
    # In Ray's processes the key stands for the variable: what the user's environment loads is loaded there too.
    inherited = [name for name in os.environ.get(MODULES, "").split(",") if name]
    yield f"++{MODULES_KEY}={quoted(','.join(dict.fromkeys([*inherited, REGISTRATION])))}"
    if plan.folder is not None:
        yield setting("+ray_kwargs.ray_init._temp_dir", plan.folder / "ray")
