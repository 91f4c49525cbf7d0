"""Effects of the patches of vLLM."""

import contextlib
import multiprocessing
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

from post_training.hang_detection.signs import process_signs
from tests.demonstrations import Upstream, demonstrates
from verl_patches.features.compatibility.feature import (
    KV_CACHE_SIZE,
    START_UP,
    VERL_ON_VLLM,
    VLLM_ON_TORCH,
    VLLM_PROCESSES,
)
from verl_patches.features.direct_loading.feature import DIRECT_LOADING
from verl_patches.features.dp_sync.feature import DP_SYNC
from verl_patches.features.precision.feature import PRECISION
from verl_patches.features.request_noise.feature import REQUEST_NOISE
from verl_patches.features.residency.feature import RESIDENCY
from verl_patches.features.rollout_parallel.feature import ROLLOUT_EXPERT_PARALLEL
from verl_patches.features.rollout_rebalance.feature import ROLLOUT_REBALANCE
from verl_patches.features.temperature.feature import TEMPERATURE
from verl_patches.features.watch.feature import WATCH

LLM = "vllm.entrypoints.llm:LLM.__init__"


@contextlib.contextmanager
def module_with(name, **content):
    """Replace a module by one that has only `content`."""
    parts = name.split(".")
    names = [".".join(parts[: end + 1]) for end in range(len(parts))]
    modules = {each: ModuleType(each) for each in names}
    vars(modules[name]).update(content)
    with mock.patch.dict(sys.modules, modules):
        yield


@demonstrates("vllm.config:ParallelConfig.has_unfinished_dp", DP_SYNC)
def the_last_agreement_is_asked(body):
    loop = SimpleNamespace(goes_on=lambda unfinished: f"unfinished: {unfinished}")
    found = mock.patch("verl_patches.features.dp_sync.decode_loop.loop_of", return_value=loop)
    state = module_with("vllm.distributed.parallel_state", get_dp_group=lambda: None)
    with state, found, mock.patch.dict(sys.modules, {"vllm.envs": (envs := ModuleType("vllm.envs"))}):
        envs.VLLM_ENABLE_V1_MULTIPROCESSING = False
        sys.modules["vllm"].envs = envs
        return body(Upstream(), "host", True)


@contextlib.contextmanager
def a_rollout_goes_on():
    """Let a stand-in decode loop be running in the block."""
    loop = SimpleNamespace(step=lambda core, step: "windowed", idle_step=lambda run, scheduler: None)
    with mock.patch("verl_patches.features.dp_sync.decode_loop.going", return_value=loop):
        yield


@demonstrates("vllm.v1.engine.core:EngineCore.step", DP_SYNC)
def a_step_is_made_within_the_window(body):
    with a_rollout_goes_on():
        return body(Upstream(), SimpleNamespace())


@demonstrates("vllm.v1.engine.core:EngineCore.execute_dummy_batch", DP_SYNC)
def nobody_runs_a_batch_for_nobody(body):
    upstream = Upstream()
    with a_rollout_goes_on():
        body(upstream, SimpleNamespace(scheduler=None))
    return len(upstream.calls)


@contextlib.contextmanager
def requests_move():
    """Yield a list of the calls to a stand-in request migration, which is active in the block."""
    asked = []
    migration = SimpleNamespace(
        move=lambda core: asked.append("moved"),
        stepping=contextlib.nullcontext,
        own_outputs=lambda core, outputs: f"own of {outputs}",
        has_work=lambda core: True,
    )
    of_loop = mock.patch(
        "verl_patches.features.rollout_rebalance.migration.migration_of", lambda loop: contextlib.nullcontext(migration)
    )
    with a_rollout_goes_on(), of_loop:
        yield asked


@demonstrates("vllm.v1.engine.core:EngineCore.step", ROLLOUT_REBALANCE)
def requests_move_before_a_step_which_gives_its_own_outputs(body):
    with requests_move() as asked:
        return str(body(lambda core: ("outputs", True), SimpleNamespace())), asked


@demonstrates("vllm.v1.engine.core:EngineCore.execute_dummy_batch", ROLLOUT_REBALANCE)
def an_idle_engine_makes_a_step_for_migrated_requests(body):
    steps = []
    with requests_move():
        body(Upstream(), SimpleNamespace(step=lambda: steps.append("step")))
    return steps


@demonstrates("vllm.v1.engine.llm_engine:LLMEngine.add_request", REQUEST_NOISE)
def a_request_gets_noise_of_its_own(body):
    given = "verl_patches.features.request_noise.generators.with_noise_of_its_own"
    upstream = Upstream()
    with mock.patch(given, lambda params: "own"):
        body(upstream, SimpleNamespace(), "1", "prompt", "given")
    return str(upstream.calls)


@demonstrates("vllm.v1.engine.llm_engine:LLMEngine.add_request", ROLLOUT_REBALANCE)
def a_request_is_looked_at_before_it_may_move(body):
    required = "verl_patches.features.rollout_rebalance.requests.require_movable"
    with mock.patch(required) as require:
        body(Upstream(), SimpleNamespace(), "1", "prompt", "given")
    return str(require.call_args_list)


@demonstrates("vllm.engine.arg_utils:EngineArgs._is_v1_supported_oracle", PRECISION)
def float32_passes(body):
    return str(body(lambda self, config: config.dtype, None, SimpleNamespace(dtype=torch.float32)))


def options_of_engine(body, **options):
    """Return the options with which vLLM's engine is created."""
    upstream = Upstream()
    body(upstream, SimpleNamespace(), **options)
    return upstream.options


@demonstrates(LLM, VERL_ON_VLLM)
def multi_modal_options_are_for_models_that_read_images(body):
    options = {"limit_mm_per_prompt": None, "disable_mm_preprocessor_cache": True}
    with mock.patch("verl_patches.features.compatibility.image_models.reads_images", lambda folder: folder == "images"):
        return [options_of_engine(body, model=model, **options) for model in ("text", "images")]


@demonstrates(LLM, RESIDENCY)
def sleep_mode_stays_off(body):
    return options_of_engine(body, enable_sleep_mode=True)


@demonstrates(LLM, ROLLOUT_EXPERT_PARALLEL)
def experts_are_spread(body):
    environment = mock.patch("verl_patches.features.rollout_parallel.engine_environment.set_engine_environment")
    rank, world = mock.patch("torch.distributed.get_rank", lambda: 0), mock.patch("torch.distributed.get_world_size")
    with rank, world as size, environment:
        size.return_value = 4
        return options_of_engine(body, tensor_parallel_size=4)


@demonstrates(LLM, DIRECT_LOADING)
def the_engine_is_filled(body):
    """The engine is filled from the settings' folder by its model's own placement; derived weights are refreshed."""
    model = SimpleNamespace()
    runner = SimpleNamespace(get_model=lambda: model)
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=None))
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    executor = SimpleNamespace(driver_worker=worker)
    engine = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config, model_executor=executor))
    table = SimpleNamespace(vllm_ascend=lambda placement, rank: [placement, rank], shapes="shapes")
    filled = []
    with (
        mock.patch("torch.distributed.get_rank", return_value=3),
        mock.patch("post_training.models.families.table_for", return_value=table),
        mock.patch("post_training.layouts.model_tensors.rollout_tensors", return_value="tensors"),
        mock.patch("post_training.layouts.placements.rollout_placement", return_value="placement"),
        mock.patch("post_training.checkpoint.loading.ignored_prefixes", return_value="ignored"),
        mock.patch(
            "post_training.checkpoint.loading.load_from_huggingface",
            side_effect=lambda *arguments: filled.append([*arguments[:-1], arguments[-1].__name__]),
        ),
        mock.patch(
            "post_training.reshard.mla_refresh.refresh_absorbed_weights",
            side_effect=lambda of: filled.append(of is model),
        ),
    ):
        body(Upstream(), engine)
    return filled


@demonstrates("vllm.model_executor.models.registry:_LazyRegisteredModel.inspect_model_cls", START_UP)
def the_class_is_looked_at_here(body):
    lazy = SimpleNamespace(load_model_cls=lambda: "class")
    info = SimpleNamespace(from_model_cls=lambda found: f"looked at {found}")
    with (
        module_with("vllm.model_executor.models.registry", _ModelInfo=info),
        mock.patch("torch.npu.is_initialized", return_value=True),
    ):
        return body(Upstream(), lazy)


@demonstrates("torch._library.infer_schema:SUPPORTED_PARAM_TYPES", VLLM_ON_TORCH)
def lists_of_int_have_a_schema(body):
    return body(None).get(list[int])


@demonstrates("vllm.utils:get_mp_context", VLLM_PROCESSES)
def spawned_processes_are_patched(body):
    # The real module imports the prelude, which belongs in a fresh process.
    with module_with("vllm_patches.spawned_process", PatchedSpawnContext=lambda: "ours"):
        return str(body(lambda: multiprocessing.get_context("spawn")))


@demonstrates("vllm.v1.core.kv_cache_utils:get_num_blocks", KV_CACHE_SIZE)
def the_override_counts(body):
    config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks_override=256))
    return body(lambda config: 1000, config)


def calls_of_sleeping_engine(body):
    """Return how often upstream is asked to sleep or wake up while sleep mode is off."""
    upstream = Upstream()
    model = SimpleNamespace(enable_sleep_mode=False)
    body(upstream, SimpleNamespace(vllm_config=SimpleNamespace(model_config=model)))
    return len(upstream.calls)


for method in ("sleep", "wake_up"):
    demonstrates(f"vllm.v1.engine.llm_engine:LLMEngine.{method}", VERL_ON_VLLM)(calls_of_sleeping_engine)


@demonstrates("vllm.v1.sample.sampler:Sampler.forward", TEMPERATURE)
def the_temperature_is_handed_on(body):
    from verl_patches.features.temperature.scaling import as_sampled

    metadata = SimpleNamespace(temperature=torch.tensor([0.5]), max_num_logprobs=None)

    def forward(self, logits, metadata):
        return SimpleNamespace(logprobs_tensors=None, reported=as_sampled(logits).tolist())

    return body(forward, None, torch.ones(1, 2), metadata).reported


@demonstrates("vllm.v1.sample.ops.topk_topp_sampler:random_sample", TEMPERATURE)
def what_was_drawn_from_is_kept(body):
    from verl_patches.features.temperature.sampled import drawing

    narrowed = {"max_num_logprobs": 0, "top_k": 5, "top_p": None, "min_p": None, "allowed_token_ids_mask": None}
    with drawing(SimpleNamespace(**narrowed)) as draw:
        body(lambda probs, generators: probs.div_(2), torch.ones(1, 2), {})
    return None if draw.probabilities is None else draw.probabilities.tolist()


@demonstrates("vllm.v1.sample.sampler:Sampler.compute_logprobs", TEMPERATURE)
def log_probs_are_of_what_is_sampled(body):
    from verl_patches.features.temperature.scaling import reporting

    with reporting(torch.tensor([0.5])):
        return body(lambda self, logits: logits.tolist(), None, torch.ones(1, 2))


@demonstrates("vllm.v1.engine.llm_engine:LLMEngine.step", WATCH)
def a_step_is_progress(body):
    before = process_signs().now("0", 0, "").moves
    body(Upstream(), SimpleNamespace())
    return process_signs().now("0", 0, "").moves - before
