"""Effects of the patches of verl."""

import contextlib
import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pyarrow
import torch
from datasets import Features
from omegaconf import OmegaConf
from tensordict import TensorDict
from transformers import DeepseekV3Config
from verl import DataProto

import overlay
from post_training import process_context
from post_training.hang_detection.signs import Signs, process_signs
from tests.demonstrations import Upstream, demonstrates
from tests.demonstrations.vllm_patches import module_with
from verl_patches.features import settings
from verl_patches.features.answer_ends.feature import ANSWER_ENDS
from verl_patches.features.chunked_log_probs.deferred import DeferredLogits
from verl_patches.features.chunked_log_probs.feature import CHUNKED_LOG_PROBS
from verl_patches.features.compatibility.feature import (
    DATA_FILES,
    ENTROPY_BONUS,
    FULLY_SHARDED,
    IMAGE_PROMPTS,
    IMAGES,
    MEGATRON_ON_NPU,
    OWN_MODELS,
    ROLLOUT_SEED,
    SETTINGS,
    VERL_ON_NPU,
)
from verl_patches.features.critic import tokens
from verl_patches.features.critic.feature import CRITIC
from verl_patches.features.critic.warmup import ENDS_STEP
from verl_patches.features.dynamic_batches.feature import DYNAMIC_BATCHES
from verl_patches.features.exact_loss import update_loss
from verl_patches.features.exact_loss.feature import EXACT_LOSS
from verl_patches.features.expert_sets.feature import EXPERT_SETS
from verl_patches.features.learning_rate.feature import LEARNING_RATE
from verl_patches.features.measure import serialized
from verl_patches.features.measure.feature import MEASURE, MeasureSettings
from verl_patches.features.measure.step_record import StepRecord
from verl_patches.features.mindspeed.feature import MINDSPEED
from verl_patches.features.nonfinite.feature import NONFINITE
from verl_patches.features.onpolicy.feature import ONPOLICY
from verl_patches.features.partial_rollout.feature import PARTIAL_ROLLOUT
from verl_patches.features.precision.feature import PRECISION
from verl_patches.features.profile.feature import PROFILE
from verl_patches.features.request_noise.feature import REQUEST_NOISE
from verl_patches.features.reshard.feature import RESHARD, WHOLE_WEIGHTS
from verl_patches.features.residency.feature import PHASES
from verl_patches.features.router_balance.feature import ROUTER_BALANCE
from verl_patches.features.sample_handles.feature import SAMPLE_HANDLES
from verl_patches.features.sequence_ratio.feature import SEQUENCE_RATIO
from verl_patches.features.shared_chunks.feature import SHARED_CHUNKS
from verl_patches.features.temperature.feature import TEMPERATURE
from verl_patches.features.tracking.feature import TRACKING
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT
from verl_patches.features.watch.feature import WATCH

WORKER = "verl.workers.megatron_workers:ActorRolloutRefWorker"
TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
ACTOR = "verl.workers.actor.megatron_actor:MegatronPPOActor"
CHECKPOINTS = "verl.utils.checkpoint.megatron_checkpoint_manager:MegatronCheckpointManager"
MANAGER = "verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager"
FSDP_WORKER = "verl.workers.fsdp_workers:ActorRolloutRefWorker"
FSDP_ACTOR = "verl.workers.actor.dp_actor:DataParallelPPOActor"
FSDP_CRITIC_WORKER = "verl.workers.fsdp_workers:CriticWorker"
FSDP_CRITIC = "verl.workers.critic.dp_critic:DataParallelPPOCritic"
CRITIC_WORKER = "verl.workers.megatron_workers:CriticWorker"
MEGATRON_CRITIC = "verl.workers.critic.megatron_critic:MegatronPPOCritic"
CRITICS_SCHEDULE = "verl.workers.critic.megatron_critic:get_forward_backward_func"
FSDP_MANAGER = "verl.workers.sharding_manager.fsdp_vllm:FSDPVLLMShardingManager"
FSDP_CHECKPOINTS = "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager"
ROLLOUT = "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout"
NO_MODEL = {"model": {"path": "/no/model"}, "rollout": {}}
DEEPSEEK = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"])


class OursIsAsked(Exception):
    """Raised by a stand-in for a part of ours; its arguments describe those of the call."""


@contextlib.contextmanager
def fresh_context():
    """Give the block its own process context."""
    with mock.patch.object(process_context, "_context", process_context.ProcessContext()) as own:
        yield own


@contextlib.contextmanager
def instead_of(*names):
    """Replace parts of ours by stand-ins that raise OursIsAsked."""

    def asked(*given, **named):
        raise OursIsAsked(*map(in_words, given), *(f"{name}={in_words(named[name])}" for name in sorted(named)))

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(name, side_effect=asked))
        yield


def in_words(value) -> str:
    """Return the value's representation if it is plain, else its type's name."""
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


def asks_ours(call) -> bool | str:
    """Return the arguments with which the call reaches a stand-in for a part of ours, or False if it does not."""
    try:
        call()
    except OursIsAsked as error:
        return f"asked with ({', '.join(error.args)})"
    return False


@contextlib.contextmanager
def phases():
    """Yield a list that collects the phases which the offload manager enters in the block."""
    entered = []
    residency = SimpleNamespace(enter=entered.append, close=lambda: None)
    with mock.patch("verl_patches.workers.process_residency.process_residency", return_value=residency):
        yield entered


@contextlib.contextmanager
def output_folder():
    """Yield an output folder that is active in the block."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = replace(settings.current(), measure=MeasureSettings(output_dir=folder))
        with mock.patch.object(settings, "_current", chosen):
            yield Path(folder)


@demonstrates("verl.models.mcore.model_forward:gptmodel_forward", TEMPERATURE)
def logits_are_divided(body):
    return body(lambda logits_processor: logits_processor(torch.ones(2)), logits_processor=torch.Tensor.tolist)


@demonstrates("verl.models.mcore.registry:hf_to_mcore_config", OWN_MODELS)
def the_configuration_is_ours(body):
    with instead_of("post_training.models.megatron.deepseek_v3_config.deepseek_v3_config_from_huggingface"):
        return asks_ours(lambda: body(Upstream(), DeepseekV3Config(**vars(DEEPSEEK)), torch.bfloat16))


@demonstrates("verl.models.mcore.registry:init_mcore_model", OWN_MODELS)
def the_model_is_ours(body):
    with instead_of("post_training.models.megatron.deepseek_v3_model.build_deepseek_v3"):
        return asks_ours(lambda: body(Upstream(), None, DEEPSEEK))


def engine_with(**parts):
    """Replace the module that needs MindSpeed-LLM, which is not installed here."""
    module = SimpleNamespace(**parts)
    return mock.patch.dict("sys.modules", {"post_training.models.mindspeed.packed_gpt_model": module})


@demonstrates("verl.models.mcore.registry:hf_to_mcore_config", MINDSPEED)
def the_configuration_has_the_engines_arguments(body):
    with engine_with(with_arguments=lambda config: f"{config} with arguments"):
        return body(Upstream(), DEEPSEEK, torch.bfloat16)


@demonstrates("verl.models.mcore.registry:hf_to_mcore_config", ROUTER_BALANCE)
def the_router_deals_experts_out(body):
    upstream = Upstream()
    body(upstream, DEEPSEEK, torch.bfloat16)
    return upstream.options


@demonstrates("verl.models.mcore.registry:init_mcore_model", MINDSPEED)
def the_model_is_the_engines(body):
    with engine_with(build_deepseek_v3=lambda *arguments: "MindSpeed-LLM's"):
        return body(Upstream(), None, DEEPSEEK)


@demonstrates("verl.models.mcore.registry:init_mcore_model", CRITIC)
def a_critic_has_a_head_of_its_own(body):
    head = SimpleNamespace(ValueHead=lambda config: "values")
    with mock.patch.dict("sys.modules", {"post_training.models.megatron.value_head": head}):
        return vars(body(lambda *_, **__: SimpleNamespace(), None, DEEPSEEK, True, True, value=True))


@demonstrates(f"{WORKER}.__init__", MINDSPEED)
def the_engine_starts_before_the_worker(body):
    with instead_of("verl_patches.features.mindspeed.megatron_adaptor.start_for"):
        return asks_ours(lambda: body(Upstream(), SimpleNamespace(), {}, "actor"))


@demonstrates("verl.models.mcore.registry:get_mcore_weight_converter", OWN_MODELS)
def no_converter_is_needed(body):
    return body(Upstream(), DEEPSEEK, torch.bfloat16)


@demonstrates("verl.models.weight_loader_registry:get_weight_saver", OWN_MODELS)
def checkpoints_are_not_gathered_as_transformer_engines(body):
    return body(Upstream(), "DeepseekV3ForCausalLM") == "upstream"


@demonstrates("verl.utils.megatron_utils:get_transformer_layer_offset", OWN_MODELS)
def uneven_stages_have_their_own_offsets(body):
    return body(Upstream(), 1, None, SimpleNamespace(first_layer_of_stage=[0, 2].__getitem__))


@demonstrates("verl.utils.megatron_utils:per_tensor_generator", OWN_MODELS)
def tensors_are_gathered_by_our_tables(body):
    with instead_of("post_training.models.families.table_for"):
        return asks_ours(lambda: body(Upstream(), None, DEEPSEEK, None, None))


@demonstrates("verl.utils.model:load_megatron_gptmodel_weights", OWN_MODELS)
def weights_are_loaded_by_our_tables(body):
    config = SimpleNamespace(model={})
    with instead_of("post_training.models.families.table_for"):
        return asks_ours(lambda: body(Upstream(), config, DEEPSEEK, None, None))


@demonstrates("verl.utils.model:load_mcore_dist_weights", OWN_MODELS)
def shards_are_loaded_by_their_own_reader(body):
    with instead_of("post_training.checkpoint.shard_loading.is_shard_folder"):
        return asks_ours(lambda: body(Upstream(), None, "folder"))


@demonstrates(f"{TRAINER}.__init__", SETTINGS)
def a_bad_combination_rejected(body):
    from verl_patches.trainer.main_ppo import compose

    upstream = Upstream()
    config = compose("rehearsal", ["actor_rollout_ref.actor.megatron.grad_offload=true"])
    with contextlib.suppress(overlay.ConfigurationError):
        body(upstream, SimpleNamespace(), config)
    return len(upstream.calls)


@demonstrates(f"{WORKER}.update_actor", LEARNING_RATE)
def the_rate_follows_the_step(body):
    optim = {"lr": 1.0, "warmup_style": "constant", "lr_warmup_steps": 4, "total_training_steps": 8}
    groups = [{"lr": 1.0}]
    worker = SimpleNamespace(
        actor_optimizer=SimpleNamespace(param_groups=groups), config=SimpleNamespace(actor=SimpleNamespace(optim=optim))
    )
    answer = SimpleNamespace(meta_info={"metrics": {}})
    body(lambda self, data: answer, worker, SimpleNamespace(meta_info={"training_step": 3}))
    return groups, answer.meta_info


@demonstrates(f"{CRITIC_WORKER}.update_critic", LEARNING_RATE)
def the_critics_rate_follows_the_step(body):
    optim = {"lr": 1.0, "warmup_style": "constant", "lr_warmup_steps": 4, "total_training_steps": 8}
    groups, answer = [{"lr": 1.0}], SimpleNamespace(meta_info={"metrics": {}})
    worker = SimpleNamespace(critic_optimizer=SimpleNamespace(param_groups=groups), config=SimpleNamespace(optim=optim))
    body(lambda self, data: answer, worker, SimpleNamespace(meta_info={"training_step": 3}))
    return groups, answer.meta_info


@demonstrates("verl.utils.tracking:Tracking.__init__", TRACKING)
def trackers_are_made_when_they_are_needed(body):
    upstream, tracking = Upstream(), SimpleNamespace()
    body(upstream, tracking, "project", "experiment", ["console"], {})
    return str(upstream.calls)


@demonstrates("verl.utils.tracking:Tracking.log", TRACKING)
def a_step_goes_through_the_trackers_of_the_run(body):
    with mock.patch("verl_patches.features.tracking.run.process_trackers") as trackers:
        body(Upstream(), SimpleNamespace(), data={"reward": 0.5}, step=1)
    return trackers.return_value.log.call_count


@demonstrates("verl.utils.tracking:Tracking.__del__", TRACKING)
def trackers_that_were_rejected_are_not_ended(body):
    upstream = Upstream()
    body(upstream, SimpleNamespace())
    return str(upstream.calls)


@demonstrates("flash_attn.bert_padding", MEGATRON_ON_NPU)
def padding_functions_are_there(body):
    return callable(body("flash_attn.bert_padding").pad_input)


@demonstrates("verl.utils.megatron.tensor_parallel:_VocabParallelEntropy.forward", MEGATRON_ON_NPU)
def nothing_is_compiled(body):
    return body(lambda: torch.compile(asks_ours) is asks_ours)


@demonstrates("verl.utils.megatron_utils:init_megatron_optim_config", PRECISION)
def the_optimizer_is_in_float32(body):
    return str(body(lambda config: config, SimpleNamespace(params_dtype=torch.bfloat16)).params_dtype)


@demonstrates(f"{WORKER}._build_model_optimizer", PRECISION)
def the_model_is_in_float32(body):
    worker = SimpleNamespace(dtype=torch.bfloat16)
    body(Upstream(), worker)
    return str(worker.dtype)


@demonstrates(f"{WORKER}._build_model_optimizer", NONFINITE)
def weights_are_looked_at(body):
    worker = SimpleNamespace(_is_actor=True, config=SimpleNamespace(model=SimpleNamespace(path="folder")))
    with instead_of("post_training.finite_steps.weights.check_weights"):
        return asks_ours(lambda: body(lambda self: ([], None), worker))


@demonstrates(f"{CRITIC_WORKER}._build_critic_model_optimizer", PRECISION)
def the_critic_is_in_float32(body):
    worker = SimpleNamespace(dtype=torch.bfloat16)
    with mock.patch.object(settings, "_current", settings.OverlaySettings(precision="float32")):
        body(Upstream(), worker)
    return str(worker.dtype)


@demonstrates(f"{CRITIC_WORKER}._build_critic_model_optimizer", NONFINITE)
def the_critics_weights_are_looked_at(body):
    worker = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(path="folder")))
    with instead_of("post_training.finite_steps.weights.check_weights"):
        return asks_ours(lambda: body(lambda self: ([], None), worker))


@demonstrates("verl.trainer.ppo.reward:compute_reward", MEASURE)
def a_failure_that_verl_passes_over_is_noted(body):
    from post_training.rewards import failures

    def upstream(data, reward_fn):
        with contextlib.suppress(ValueError):
            reward_fn(data)
        return "scores"

    def failing(data):
        raise ValueError

    with failures.counted():
        body(upstream, None, failing)
        return failures.take()


@demonstrates("verl.workers.reward_manager.prime:single_compute_score", MEASURE)
def an_answer_without_a_score_is_noted(body):
    import asyncio

    from post_training.rewards import failures

    async def upstream(*arguments):
        return None

    with failures.counted():
        asyncio.run(body(upstream, None, "completion", "reference", "task"))
        return failures.take()


@demonstrates(f"{ACTOR}.make_minibatch_iterator", MEASURE)
def the_rollouts_log_probs_are_kept(body):
    data = SimpleNamespace(batch={"rollout_log_probs": 1, "responses": 2}, select=lambda batch_keys: batch_keys)
    return body(lambda self, data: data.select(batch_keys=["responses"]), SimpleNamespace(), data)


def update_of(body):
    """Run the update's schedule on one micro batch, and return the old log-probs that the loss sees."""
    columns = ("old_log_probs", "rollout_log_probs")
    batch = {"responses": torch.zeros(1, 2, dtype=torch.int64), "attention_mask": torch.ones(1, 3)}
    batch |= {name: torch.zeros(1, 2) for name in columns}

    def schedule(*, forward_step_func, forward_only):
        output, loss = forward_step_func(None, None)
        return loss(output)

    def forward_step(batches, model):
        loss = partial(lambda output, data: data["old_log_probs"].tolist(), data=batch)
        return {"log_probs": torch.ones(1, 3)}, loss

    return body(lambda: schedule)(forward_step_func=forward_step, forward_only=False)


demonstrates("verl.workers.actor.megatron_actor:get_forward_backward_func", ONPOLICY)(update_of)


@demonstrates("verl.workers.actor.megatron_actor:get_forward_backward_func", MEASURE)
def the_distance_to_the_rollout_is_recorded(body):
    with fresh_context() as context:
        update_of(body)
        return context.of(StepRecord).difference.largest


@demonstrates("verl.workers.actor.megatron_actor:get_forward_backward_func", EXACT_LOSS)
def the_loss_is_that_of_the_whole_mini_batch(body):
    megatron = SimpleNamespace(mpu=SimpleNamespace(get_data_parallel_group=lambda: None))
    ours = "verl_patches.features.exact_loss.update_loss.with_exact_loss"
    with mock.patch.dict("sys.modules", {"megatron.core": megatron}), instead_of(ours):
        return asks_ours(lambda: body(Upstream()))


@demonstrates("verl.workers.actor.megatron_actor:get_forward_backward_func", DYNAMIC_BATCHES)
def the_schedule_can_cut_by_tokens(body):
    names = ("data_parallel_group", "tensor_model_parallel_world_size", "context_parallel_world_size")
    megatron = SimpleNamespace(mpu=SimpleNamespace(**{f"get_{name}": lambda: 1 for name in names}))
    ours = "verl_patches.features.dynamic_batches.micro_batches.with_dynamic_batches"
    with mock.patch.dict("sys.modules", {"megatron.core": megatron}), instead_of(ours):
        return asks_ours(lambda: body(Upstream()))


@demonstrates(CRITICS_SCHEDULE, EXACT_LOSS)
def the_critics_loss_is_that_of_the_whole_mini_batch(body):
    with update_loss.of_critic("token-mean"):
        return the_loss_is_that_of_the_whole_mini_batch(body)


@demonstrates(f"{MEGATRON_CRITIC}.forward_backward_batch", EXACT_LOSS)
def a_pass_of_the_critic_has_its_mode(body):
    critic = SimpleNamespace(config=SimpleNamespace(loss_agg_mode="seq-mean-token-mean"))
    return body(lambda self, data: update_loss._of_critic[-1:], critic, None)


demonstrates(CRITICS_SCHEDULE, DYNAMIC_BATCHES)(the_schedule_can_cut_by_tokens)


@demonstrates(f"{MEGATRON_CRITIC}.forward_backward_batch", DYNAMIC_BATCHES)
def the_critics_batch_is_handed_on_whole(body):
    config = OmegaConf.create(
        {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 8, "ppo_micro_batch_size_per_gpu": 1}
    )
    critic, data = SimpleNamespace(config=config), SimpleNamespace(batch=[1, 2, 3])
    return body(lambda self, data, **given: {"given": given}, critic, data, use_dynamic_bsz=True, micro_batch_size=1)


@demonstrates(f"{ACTOR}.forward_backward_batch", DYNAMIC_BATCHES)
def the_batch_is_handed_on_whole(body):
    actor, data = SimpleNamespace(actor_optimizer=None), SimpleNamespace(batch=[1, 2, 3], meta_info={})
    return body(lambda self, data, **given: {"given": given}, actor, data, use_dynamic_bsz=True, micro_batch_size=1)


@demonstrates("verl.workers.actor.megatron_actor:vocab_parallel_entropy", ENTROPY_BONUS)
def the_entropy_has_logits_of_its_own(body):
    logits = torch.zeros(1, requires_grad=True)
    return body(lambda given: given is logits, logits)


@demonstrates(f"{ACTOR}.forward_backward_batch", VERL_ON_NPU)
def every_tensor_has_a_storage(body):
    together = torch.zeros(32, dtype=torch.uint8).view(torch.int64)
    data = SimpleNamespace(batch=TensorDict({"one": together[:2], "other": together[2:]}, [2]))
    return body(lambda self, data: data.batch["one"].untyped_storage().nbytes(), None, data)


@demonstrates(f"{ACTOR}.update_policy", NONFINITE)
def steps_are_guarded(body):
    actor = SimpleNamespace(actor_optimizer=SimpleNamespace(), actor_module=[])
    return body(lambda self, dataloader: type(self.actor_optimizer).__name__, actor, None)


@demonstrates(f"{MEGATRON_CRITIC}.update_critic", NONFINITE)
def the_critics_steps_are_guarded(body):
    critic = SimpleNamespace(critic_optimizer=SimpleNamespace(), critic_module=[])
    return body(lambda self, dataloader: type(self.critic_optimizer).__name__, critic, None)


@demonstrates(f"{FSDP_WORKER}.__init__", SETTINGS)
@demonstrates(f"{WORKER}.__init__", SETTINGS)
def the_workers_settings_are_in_force(body):
    with mock.patch.object(settings, "_current", settings.OverlaySettings.all_off()):
        node = {"overlay": {"precision": "float32"}, "model": {"path": "/nowhere"}}
        body(Upstream(), SimpleNamespace(), node, "actor")
        return settings.current().precision


@demonstrates(f"{WORKER}._build_rollout", PHASES)
def training_state_is_away_while_the_engine_starts(body):
    runner = SimpleNamespace(worker=SimpleNamespace(model_runner=None))
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))
    rollout = SimpleNamespace(inference_engine=SimpleNamespace(llm_engine=engine))
    worker = SimpleNamespace(actor_module=[], actor_optimizer=None)
    registration = "verl_patches.features.residency.registration"
    with phases() as entered, mock.patch(f"{registration}.register_actor"):
        rewritten = "verl_patches.workers.megatron_workers._rewritten_weights"
        with mock.patch(f"{registration}.register_rollout"), mock.patch(rewritten):
            body(lambda self: (rollout, "manager"), worker)
    return entered


@demonstrates(f"{WORKER}._build_rollout", EXPERT_SETS)
def the_rollouts_choices_are_watched(body):
    layer = SimpleNamespace(mlp=SimpleNamespace(gate="router"))
    model = torch.nn.Identity()
    model.model = SimpleNamespace(layers=[layer])
    runner = SimpleNamespace(get_model=lambda: model, _dummy_run=None)
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
    rollout = SimpleNamespace(inference_engine=SimpleNamespace(llm_engine=engine))
    with fresh_context():
        body(lambda self: (rollout, "manager"), "worker")
    return len(model._forward_pre_hooks)


@demonstrates(f"{ACTOR}.forward_backward_batch", EXPERT_SETS)
def the_update_of_an_on_policy_run_is_recorded(body):
    recorded = []

    @contextlib.contextmanager
    def recording(*arguments):
        recorded.append(arguments[0])
        yield

    actor = SimpleNamespace(actor_optimizer="optimizer", actor_module="model", tf_config=None)
    with mock.patch("verl_patches.features.expert_sets.training.recorded_pass", recording):
        body(Upstream(), actor, "batch", forward_only=False)
        body(Upstream(), actor, "batch", forward_only=True)
    return recorded


@demonstrates("verl.models.mcore.model_forward:gptmodel_forward", EXPERT_SETS)
def the_tokens_of_a_micro_batch_are_named(body):
    named = mock.MagicMock()
    with mock.patch("verl_patches.features.expert_sets.training.micro_batch", named):
        body(Upstream(), "model", "tokens", "mask")
    return str(named.call_args)


@demonstrates(f"{WORKER}.init_model", PHASES)
def the_reference_policy_leaves(body):
    with phases() as entered, mock.patch("verl_patches.features.residency.registration.register_reference"):
        body(Upstream(), SimpleNamespace(_is_ref=True, ref_module=[]))
    return entered


@demonstrates(f"{CRITIC_WORKER}.init_model", PHASES)
def the_critic_leaves(body):
    with phases() as entered, mock.patch("verl_patches.features.residency.registration.register_critic"):
        body(Upstream(), SimpleNamespace(critic_module=[], critic_optimizer=None))
    return entered


@demonstrates(f"{FSDP_WORKER}.init_model", MEASURE)
@demonstrates(f"{WORKER}.init_model", MEASURE)
def the_patches_in_use_are_asserted_and_written(body):
    worker = SimpleNamespace(rank=0, _is_rollout=True)
    report = mock.patch.object(overlay, "assert_effective", return_value=overlay.effective.OverlayReport())
    with output_folder() as folder, report as asserted:
        body(Upstream(), worker)
        return asserted.call_count, sorted(file.name for file in folder.iterdir())


def phase_entered(*arguments):
    """Return an effect test: the phase of a worker's method is entered."""

    def demonstration(body):
        with phases() as entered:
            body(Upstream(), SimpleNamespace(), *arguments)
        return entered

    return demonstration


for method in ("compute_log_prob", "compute_ref_log_prob", "update_actor", "save_checkpoint", "load_checkpoint"):
    demonstrates(f"{WORKER}.{method}", PHASES)(phase_entered(None))
for method in ("compute_log_prob", "compute_ref_log_prob", "update_actor"):
    demonstrates(f"{FSDP_WORKER}.{method}", PHASES)(phase_entered(None))
for method in ("compute_values", "update_critic"):
    demonstrates(f"{FSDP_CRITIC_WORKER}.{method}", PHASES)(phase_entered(None))
for method in ("compute_values", "update_critic", "save_checkpoint", "load_checkpoint"):
    demonstrates(f"{CRITIC_WORKER}.{method}", PHASES)(phase_entered(None))
for manager in (MANAGER, FSDP_MANAGER):
    demonstrates(f"{manager}.__exit__", PHASES)(phase_entered(None, None, None))


@demonstrates(f"{FSDP_WORKER}.update_actor", MEASURE)
@demonstrates(f"{WORKER}.update_actor", MEASURE)
def the_step_is_measured(body):
    output = SimpleNamespace(meta_info={"metrics": {}})
    finished = mock.patch("verl_patches.features.measure.step_record.finish_step", return_value={"timing_s/x": 1.0})
    with phases(), finished:
        body(lambda self, data: output, SimpleNamespace(rank=0), SimpleNamespace(batch={}))
    return output.meta_info["metrics"]


@demonstrates(f"{FSDP_CRITIC_WORKER}.update_critic", MEASURE)
@demonstrates(f"{CRITIC_WORKER}.update_critic", MEASURE)
def a_step_without_an_update_of_the_actor_is_measured(body):
    output, batch = SimpleNamespace(meta_info={"metrics": {}}), SimpleNamespace(meta_info={ENDS_STEP: True})
    finished = mock.patch("verl_patches.features.measure.step_record.finish_step", return_value={"timing_s/x": 1.0})
    with finished:
        body(lambda self, data: output, SimpleNamespace(rank=0), batch)
    return output.meta_info["metrics"]


@demonstrates(f"{ROLLOUT}.__init__", ROLLOUT_SEED)
def every_engine_has_a_seed_of_its_own(body):
    from omegaconf import OmegaConf

    seeds = []
    second_of_two = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 1)
    rollout = SimpleNamespace(sampling_params=SimpleNamespace(seed=3))
    body(
        lambda self, path, config, tokenizer, model_config, **options: seeds.append(config.seed),
        rollout,
        "path",
        OmegaConf.create({"seed": 3}),
        None,
        None,
        device_mesh={"dp": second_of_two},
    )
    return seeds, rollout.sampling_params.seed


@demonstrates(f"{ROLLOUT}.__init__", ANSWER_ENDS)
def an_engine_stops_at_the_tokenizers_token_too(body):
    preprocessor = SimpleNamespace(get_eos_token_id=lambda: 2)
    processor = SimpleNamespace(generation_config_fields={}, input_preprocessor=preprocessor)
    rollout = SimpleNamespace(
        inference_engine=SimpleNamespace(llm_engine=SimpleNamespace(processor=processor)),
        sampling_params=SimpleNamespace(stop_token_ids=[], all_stop_token_ids=set()),
    )
    body(lambda *_: None, rollout, "/no/model", {}, SimpleNamespace(eos_token_id=2), None)
    return rollout.sampling_params.stop_token_ids


@demonstrates(f"{ROLLOUT}.generate_sequences", ANSWER_ENDS)
def a_mask_ends_with_the_engines_answer(body):
    answer = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 2])])
    rollout = SimpleNamespace(
        inference_engine=SimpleNamespace(generate=lambda: [answer]), end_tokens=SimpleNamespace(tokens=(2,))
    )
    batch = {"responses": torch.tensor([[5, 2, 0]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}

    def upstream(rollout, prompts):
        rollout.inference_engine.generate()
        return SimpleNamespace(batch=batch)

    body(upstream, rollout, SimpleNamespace(meta_info={"eos_token_id": None}))
    return batch["attention_mask"].tolist()


@demonstrates(f"{ROLLOUT}.generate_sequences", WHOLE_WEIGHTS)
def half_new_weights_rejected(body):
    with instead_of("verl_patches.features.reshard.generation.process_generation"):
        return asks_ours(lambda: body(Upstream(), SimpleNamespace(), None))


@demonstrates(f"{ROLLOUT}.generate_sequences", MEASURE)
def log_probs_of_the_samples_are_kept(body):
    sample = SimpleNamespace(token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-0.5, rank=1)}])
    engine = SimpleNamespace(generate=lambda: [SimpleNamespace(outputs=[sample])])
    batch = {"responses": torch.tensor([[5]])}

    def upstream(rollout, prompts):
        rollout.inference_engine.generate()
        return SimpleNamespace(batch=batch)

    body(upstream, SimpleNamespace(inference_engine=engine), None)
    return {name: tensor.tolist() for name, tensor in batch.items()}


@demonstrates(f"{ROLLOUT}.generate_sequences", PARTIAL_ROLLOUT)
def answers_go_on_where_they_were_left(body):
    from verl_patches.features.partial_rollout import columns
    from verl_patches.features.partial_rollout.engine import Begun, Row, Share

    answer = SimpleNamespace(token_ids=[5, 6], finish_reason="abort")
    rollout = SimpleNamespace(inference_engine=SimpleNamespace(generate=None))
    rows = [Row([Begun([5], [-0.5])])]
    prompts = columns.with_rows(DataProto.from_dict({"input_ids": torch.ones(1, 1)}), rows, Share(1, 1))

    def upstream(rollout, prompts):
        generate = rollout.inference_engine.generate
        if generate:
            generate(prompts=[{"prompt_token_ids": [3]}], sampling_params=None)
        return SimpleNamespace(batch={"responses": torch.tensor([[5, 6]])})

    with mock.patch.object(columns, "generate", lambda *_: [SimpleNamespace(outputs=[answer])]):
        return {name: each.tolist() for name, each in body(upstream, rollout, prompts).batch.items()}


@demonstrates(f"{MANAGER}.__enter__", RESHARD)
def the_plan_runs_instead_of_the_gather(body):
    from verl_patches.workers.sharding_manager import megatron_vllm

    with mock.patch.object(megatron_vllm, "_run_plan", side_effect=OursIsAsked):
        return asks_ours(lambda: body(Upstream(), SimpleNamespace()))


@demonstrates(f"{MANAGER}.__enter__", WHOLE_WEIGHTS)
def derived_weights_follow(body):
    from verl_patches.workers.sharding_manager import megatron_vllm

    refreshed = instead_of("post_training.reshard.mla_refresh.refresh_absorbed_weights")
    with refreshed, mock.patch.object(megatron_vllm, "_rollout_model"):
        with mock.patch("verl_patches.features.reshard.generation.process_generation"):
            return asks_ours(lambda: body(Upstream(), SimpleNamespace()))


@demonstrates(f"{FSDP_MANAGER}.__enter__", MEASURE)
@demonstrates(f"{MANAGER}.__enter__", MEASURE)
def a_reshard_is_timed(body):
    with fresh_context() as context:
        body(Upstream(), SimpleNamespace())
        return sorted(context.of(StepRecord).seconds)


for manager in (MANAGER, FSDP_MANAGER):
    demonstrates(f"{manager}.__enter__", PHASES)(phase_entered())


def phase_seen_within(*arguments):
    """Return an effect test: upstream's function runs within a phase."""

    def demonstration(body):
        seen = []
        body(lambda *given: seen.append(process_signs().now("0", 0, "").phase), *arguments)
        return seen

    return demonstration


for method in (
    "init_model",
    "generate_sequences",
    "compute_log_prob",
    "compute_ref_log_prob",
    "update_actor",
    "save_checkpoint",
    "load_checkpoint",
):
    demonstrates(f"{WORKER}.{method}", WATCH)(phase_seen_within(SimpleNamespace()))
    demonstrates(f"{FSDP_WORKER}.{method}", WATCH)(phase_seen_within(SimpleNamespace()))
for method in ("init_model", "compute_values", "update_critic", "save_checkpoint", "load_checkpoint"):
    demonstrates(f"{FSDP_CRITIC_WORKER}.{method}", WATCH)(phase_seen_within(SimpleNamespace()))
    demonstrates(f"{CRITIC_WORKER}.{method}", WATCH)(phase_seen_within(SimpleNamespace()))
demonstrates(f"{FSDP_MANAGER}.__enter__", WATCH)(phase_seen_within(SimpleNamespace()))
demonstrates(f"{MANAGER}.__enter__", WATCH)(phase_seen_within(SimpleNamespace()))
demonstrates("verl.trainer.ppo.reward:compute_reward", WATCH)(phase_seen_within(None, None))


def progress_of(run):
    """Return how often `run` advances the progress counter of the hang detector."""
    with fresh_context() as context:
        run()
        return context.of(Signs)._moves


@demonstrates(CRITICS_SCHEDULE, WATCH)
@demonstrates("verl.workers.actor.megatron_actor:get_forward_backward_func", WATCH)
def a_micro_batch_of_megatron_is_progress(body):
    return progress_of(lambda: update_of(body))


@demonstrates(f"{FSDP_CRITIC}._forward_micro_batch", WATCH)
@demonstrates(f"{FSDP_ACTOR}._forward_micro_batch", WATCH)
def a_micro_batch_of_fsdp_is_progress(body):
    weight = torch.ones(1, requires_grad=True)
    return progress_of(lambda: body(lambda self, batch: 2 * weight, None, {}).sum().backward())


@demonstrates(f"{FSDP_WORKER}.__init__", WATCH)
@demonstrates(f"{WORKER}.__init__", WATCH)
def a_worker_gives_signs_of_life(body):
    rank, begun = mock.patch.dict("os.environ", RANK="3"), mock.Mock()
    with rank, mock.patch("post_training.hang_detection.signs.start_in_ray", begun):
        body(Upstream(), SimpleNamespace(), {}, "actor")
    return [call.args[0] for call in begun.call_args_list]


@demonstrates(f"{CHECKPOINTS}.save_checkpoint", TRAINING_CHECKPOINT)
def ours_saves(body):
    module = "verl_patches.utils.checkpoint.megatron_checkpoint_manager"
    with instead_of(f"{module}._rank_of"):
        return asks_ours(lambda: body(Upstream(), SimpleNamespace(), "folder"))


@demonstrates(f"{CHECKPOINTS}.load_checkpoint", TRAINING_CHECKPOINT)
def ours_loads(body):
    module = "verl_patches.utils.checkpoint.megatron_checkpoint_manager"
    with instead_of(f"{module}._rank_of"):
        return asks_ours(lambda: body(Upstream(), SimpleNamespace(), "folder"))


@demonstrates(f"{WORKER}.finish_checkpoint", TRAINING_CHECKPOINT)
def a_worker_can_be_asked_to_finish(body):
    return dispatched(body(None))


@demonstrates(f"{WORKER}.profile_step", PROFILE)
@demonstrates(f"{FSDP_WORKER}.profile_step", PROFILE)
def a_worker_can_be_told_to_record(body):
    return dispatched(body(None))


def dispatched(method):
    """Return the dispatch mode with which verl's driver calls this method of a worker."""
    from verl.single_controller.base.decorator import MAGIC_ATTR

    return getattr(method, MAGIC_ATTR)["dispatch_mode"].name


@demonstrates(f"{FSDP_WORKER}._build_model_optimizer", PRECISION)
def fsdp_shards_float32(body):
    upstream, given = Upstream(), OmegaConf.create({"param_offload": True})
    with mock.patch.object(settings, "_current", settings.OverlaySettings(precision="float32")):
        body(upstream, SimpleNamespace(), fsdp_config=given)
    return OmegaConf.to_container(upstream.options["fsdp_config"])


@demonstrates(f"{FSDP_CRITIC_WORKER}._build_critic_model_optimizer", PRECISION)
def fsdp_shards_a_critic_of_float32(body):
    worker = SimpleNamespace(config=OmegaConf.create({"model": {"fsdp_config": {"param_offload": True}}}))
    with mock.patch.object(settings, "_current", settings.OverlaySettings(precision="float32")):
        body(Upstream(), worker, worker.config)
    return OmegaConf.to_container(worker.config)


@demonstrates(f"{FSDP_CRITIC}.__init__", PRECISION)
@demonstrates(f"{FSDP_ACTOR}.__init__", PRECISION)
def nothing_is_cast_on_the_device(body):
    actor = SimpleNamespace(device_name="npu")
    with mock.patch.object(settings, "_current", settings.OverlaySettings(precision="float32")):
        body(Upstream(), actor)
    return actor.device_name


@demonstrates("verl.trainer.ppo.core_algos:compute_policy_loss", SEQUENCE_RATIO)
def a_response_has_one_ratio(body):
    log_probs, old = torch.tensor([[0.0, 0.0]]), torch.tensor([[-1.0, 1.0]])
    return body(lambda old, *_: (-old).exp().tolist(), old, log_probs, torch.ones(1, 2), torch.ones(1, 2))


@demonstrates(f"{FSDP_ACTOR}.update_policy", EXACT_LOSS)
def an_update_has_factors_of_its_own(body):
    columns = {"attention_mask": torch.ones(2, 3), "responses": torch.ones(2, 1)}
    config = {"use_dynamic_bsz": True, "loss_agg_mode": "token-mean", "ppo_mini_batch_size": 2}
    data = SimpleNamespace(batch=TensorDict(columns, [2]), meta_info={})
    with instead_of("verl_patches.features.exact_loss.gradient_factors.UpdateFactors"):
        return asks_ours(lambda: body(Upstream(), SimpleNamespace(config=SimpleNamespace(**config)), data))


@demonstrates(f"{FSDP_ACTOR}._forward_micro_batch", EXACT_LOSS)
def log_probs_of_an_update_have_their_factor(body):
    factors = SimpleNamespace(weigh=lambda mask, *values: [f"weighed {value}" for value in values])
    columns = {"attention_mask": torch.ones(2, 3), "responses": torch.ones(2, 1)}
    actor = SimpleNamespace(update_in_progress=(factors, {}))
    return body(lambda self, batch: ("entropy", "log_probs"), actor, columns)


@demonstrates(f"{FSDP_CRITIC}.update_critic", EXACT_LOSS)
def an_update_of_the_critic_has_factors_of_its_own(body):
    columns = {"attention_mask": torch.ones(2, 3), "responses": torch.ones(2, 1)}
    config = {"use_dynamic_bsz": True, "loss_agg_mode": "token-mean", "ppo_mini_batch_size": 2}
    data = SimpleNamespace(batch=TensorDict(columns, [2]))
    with instead_of("verl_patches.features.exact_loss.gradient_factors.UpdateFactors"):
        return asks_ours(lambda: body(Upstream(), SimpleNamespace(config=SimpleNamespace(**config)), data))


@demonstrates(f"{FSDP_CRITIC}._forward_micro_batch", EXACT_LOSS)
def values_of_an_update_have_their_factor(body):
    factors = SimpleNamespace(weigh=lambda mask, *values: [f"weighed {value}" for value in values])
    columns = {"attention_mask": torch.ones(2, 3), "responses": torch.ones(2, 1)}
    return body(lambda self, batch: "values", SimpleNamespace(update_in_progress=factors), columns)


# An answer of two tokens, padded to three.
AN_ANSWER = {"attention_mask": torch.tensor([[1, 1, 1, 0]]), "responses": torch.ones(1, 3)}


@demonstrates(f"{MEGATRON_CRITIC}.__init__", CRITIC)
def gradients_of_the_critic_are_added_up_over_ranks(body):
    chunk = SimpleNamespace(config=SimpleNamespace(finalize_model_grads_func=None))
    body(Upstream(), SimpleNamespace(critic_module=[chunk]))
    return getattr(chunk.config.finalize_model_grads_func, "__name__", None)


@demonstrates(f"{MEGATRON_CRITIC}.compute_values", CRITIC)
@demonstrates(f"{FSDP_CRITIC}.compute_values", CRITIC)
def a_value_is_that_of_a_token(body):
    return body(lambda self, data: torch.ones(1, 3), None, SimpleNamespace(batch=AN_ANSWER)).tolist()


@demonstrates(f"{FSDP_CRITIC}._forward_micro_batch", CRITIC)
def the_loss_will_know_the_tokens_of_the_answer(body):
    with fresh_context():
        last = tokens.last_forward()
        body(Upstream(), None, AN_ANSWER)
        return last.mask(torch.ones(1, 3)).tolist()


@demonstrates("verl.trainer.ppo.core_algos:compute_value_loss", CRITIC)
def the_loss_counts_the_tokens_of_the_answer(body):
    with fresh_context():
        last = tokens.last_forward()
        last.hold(torch.tensor([[1, 1, 0]]))
        return body(lambda response_mask: response_mask.tolist(), response_mask=torch.ones(1, 3))


@demonstrates("verl.utils.fsdp_utils:apply_fsdp2", FULLY_SHARDED)
def fsdp2_finds_the_npu(body):
    with instead_of("verl_patches.features.compatibility.fully_sharded.prepare"):
        return asks_ours(lambda: body(Upstream(), "model"))


@demonstrates("verl.utils.fsdp_utils:fsdp2_clip_grad_norm_", FULLY_SHARDED)
def gradients_are_clipped_by_what_torch_has(body):
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    norm = body([weight], max_norm=1.0)
    return norm.item(), weight.grad.norm().item() < 1.001


@demonstrates("verl.utils.fsdp_utils:offload_fsdp2_model_to_cpu", FULLY_SHARDED)
def a_model_of_fsdp2_is_moved_to_the_host(body):
    model = mock.Mock()
    body(Upstream(), model)
    return model.method_calls == [mock.call.cpu()]


@demonstrates("verl.utils.fsdp_utils:load_fsdp2_model_to_gpu", FULLY_SHARDED)
def a_model_of_fsdp2_is_moved_back(body):
    model = mock.Mock()
    body(Upstream(), model)
    return [call[0] for call in model.method_calls]


@demonstrates(f"{FSDP_ACTOR}.compute_log_prob", FULLY_SHARDED)
def what_fsdp2_has_gathered_is_given_up(body):
    with instead_of("verl_patches.features.compatibility.fully_sharded.release"):
        return asks_ours(lambda: body(Upstream(), SimpleNamespace(actor_module="model")))


@demonstrates(f"{FSDP_CRITIC}._optimizer_step", NONFINITE)
@demonstrates(f"{FSDP_ACTOR}._optimizer_step", NONFINITE)
def an_update_that_fsdp_skips_is_counted(body):
    with fresh_context() as context:
        body(lambda self: torch.tensor(float("nan")), SimpleNamespace())
        return context.of(StepRecord).counts


@demonstrates(f"{FSDP_CHECKPOINTS}.save_checkpoint", TRAINING_CHECKPOINT)
@demonstrates(f"{FSDP_CHECKPOINTS}.load_checkpoint", TRAINING_CHECKPOINT)
def what_fsdp_shards_is_ours_to_save_and_load(body):
    module = "verl_patches.utils.checkpoint.fsdp_checkpoint_manager"
    manager = SimpleNamespace(
        rollout_sharding_manager=SimpleNamespace(gen_random_states=torch.zeros(1)),
        lr_scheduler=SimpleNamespace(last_epoch=1),
    )
    with instead_of(f"{module}._rank_of"):
        return asks_ours(lambda: body(Upstream(), manager, "folder"))


@demonstrates(f"{FSDP_WORKER}.init_model", TRAINING_CHECKPOINT)
def what_saves_knows_the_rollouts_random_numbers(body):
    worker = SimpleNamespace(
        _is_actor=True, checkpoint_manager=SimpleNamespace(), rollout_sharding_manager="with its random numbers"
    )
    body(Upstream(), worker)
    return vars(worker.checkpoint_manager)


@demonstrates("verl.single_controller.ray.base:RayWorkerGroup.execute_all_async", SHARED_CHUNKS)
def a_chunk_of_two_workers_is_stored_once(body):
    upstream, chunk = Upstream(), DataProto.from_dict({"tokens": torch.ones(1, 1)})
    with mock.patch("ray.put", lambda chunk: "stored"):
        body(upstream, SimpleNamespace(workers=[1, 2]), "work", [chunk, chunk])
    return upstream.calls[0][0][2:] == (["stored", "stored"],)


@demonstrates(f"{ROLLOUT}.generate_sequences", REQUEST_NOISE)
def an_engine_samples_with_the_seeds_that_were_sent(body):
    from vllm.sampling_params import SamplingParams

    from verl_patches.features.request_noise.seeds import SEED

    given = []
    engine = SimpleNamespace(generate=lambda prompts, sampling_params: given.append(sampling_params))
    prompts = DataProto.from_dict({SEED: torch.tensor([3, 4])})

    def upstream(rollout, prompts):
        rollout.inference_engine.generate(prompts=["a", "b"], sampling_params=SamplingParams())

    body(upstream, SimpleNamespace(inference_engine=engine), prompts)
    return [each.seed for each in given[0]] if isinstance(given[0], list) else given[0].seed


def asks_the_store(body):
    parallel_state = SimpleNamespace(get_data_parallel_rank=lambda: 0)
    module = SimpleNamespace(parallel_state=parallel_state)
    with mock.patch.dict("sys.modules", {"megatron.core": module}):
        with instead_of("verl_patches.features.sample_handles.store.process_store"):
            return asks_ours(lambda: body(Upstream(), SimpleNamespace(), SimpleNamespace(meta_info={})))


for method in ("generate_sequences", "compute_log_prob", "compute_ref_log_prob", "update_actor"):
    demonstrates(f"{WORKER}.{method}", SAMPLE_HANDLES)(asks_the_store)


@demonstrates("verl.protocol:DataProto.to", VERL_ON_NPU)
def a_batch_has_arrived_on_the_host(body):
    events = []
    npu = SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: events.append("wait"))
    with mock.patch.multiple("verl.utils.device", get_torch_device=lambda: npu, is_npu_available=True):
        body(lambda data, device: events.append(f"copy to {device}"), SimpleNamespace(), "cpu")
    return events


@demonstrates(f"{FSDP_MANAGER}.__init__", VERL_ON_NPU)
def a_manager_that_asks_for_cuda_is_answered_by_the_npu(body):
    """verl has `check_cuda_is_available` at the cluster's commit, but not in the release that is installed here."""
    events = []

    class Contrib(ModuleType):
        transfer_to_npu = property(lambda _: events.append("torch.cuda is the NPU"))

    for asks in (False, True):
        names = {"check_cuda_is_available": None} if asks else {}
        functions = SimpleNamespace(**names)
        modules = {"torch_npu.contrib": Contrib("torch_npu.contrib"), "verl.utils.torch_functional": functions}
        with mock.patch.dict("sys.modules", modules), mock.patch("verl.utils.torch_functional", functions):
            body(lambda self, module: events.append(module), SimpleNamespace(), f"it asks: {asks}")
    return events


@demonstrates("verl.protocol:DataProto.__getstate__", MEASURE)
def serialized_bytes_are_counted(body):
    with fresh_context():
        body(lambda self: (b"four", {}, {}), SimpleNamespace())
        return serialized.take()


class _Rows(list):
    """The part of a data set that a filter needs."""

    column_names = ("prompt", "images")

    def filter(self, fits, desc):
        return _Rows(row for row in self if fits(row))


@demonstrates("verl.utils.dataset.rl_dataset:RLHFDataset._read_files_and_tokenize", IMAGE_PROMPTS)
def prompts_with_large_images_are_left_out(body):
    """An image of 56 pixels has 2x2 tokens and one of 112 pixels 4x4; with one token of text, only the first fits 8."""
    from PIL import Image

    counts = SimpleNamespace(patch_size=14, merge_size=2, min_pixels=28 * 28, max_pixels=1 << 20)
    processor = SimpleNamespace(
        image_processor=counts,
        apply_chat_template=lambda *_, **__: "image",
        tokenizer=lambda texts, **_: {"input_ids": [[0]] * len(texts)},
    )
    prompt = [{"role": "user", "content": "<image>"}]
    rows = _Rows({"prompt": prompt, "images": [Image.new("RGB", (side, side))]} for side in (56, 112))
    data = SimpleNamespace(
        processor=processor, filter_overlong_prompts=True, prompt_key="prompt", image_key="images", max_prompt_length=8
    )

    def upstream(self):
        self.dataframe = rows

    body(upstream, data)
    return [row["images"][0].size for row in data.dataframe]


@demonstrates("verl.utils.dataset.rl_dataset:RLHFDataset._read_files_and_tokenize", DATA_FILES)
def types_of_a_later_release_are_those_of_the_file(body):
    types = {"info": {"features": {"prompt": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"}}}}
    schema = pyarrow.schema([("prompt", pyarrow.list_(pyarrow.string()))], {"huggingface": json.dumps(types)})
    read = []

    def upstream(self):
        read.append(Features.from_arrow_schema(schema))

    try:
        body(upstream, None)
    except ValueError as error:
        return str(error)
    return str(read)


@demonstrates("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:apply_rotary_pos_emb_flashatt", IMAGES)
def the_operator_gets_cosines_as_wide_as_a_head(body):
    heads, angles = torch.ones(1, 2, 1, 4, dtype=torch.bfloat16), torch.zeros(2, 4)
    with module_with("torch_npu", npu_rotary_mul=lambda x, cos, sin: x * cos + sin):
        return str(body(heads, 2 * heads, angles.cos(), angles.sin()))


@demonstrates("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionPatchEmbed.forward", IMAGES)
def patches_are_multiplied(body):
    """The kernel has one channel, two frames and two pixels."""
    module = SimpleNamespace(proj=SimpleNamespace(weight=torch.arange(8.0).view(2, 1, 2, 1, 2)))
    return str(body(module, torch.ones(1, 4, dtype=torch.bfloat16)))


@demonstrates("verl.utils.tokenizer:hf_processor", IMAGES)
def the_data_set_knows_the_image_processor(body):
    fast = type("Qwen2VLImageProcessorFast", (), {})
    slow = SimpleNamespace(from_pretrained=lambda folder, use_fast: f"{folder} use_fast={use_fast}")
    with module_with("transformers", AutoImageProcessor=slow):
        return str(body(lambda folder, **_: SimpleNamespace(image_processor=fast()), "model").image_processor)[:20]


@demonstrates("verl.models.mcore.model_forward:gptmodel_forward", CHUNKED_LOG_PROBS)
def log_probs_are_taken_of_deferred_logits(body):
    @contextlib.contextmanager
    def deferring(model, processor, chunk_bytes):
        yield f"deferred {processor}, {chunk_bytes}"

    with mock.patch("verl_patches.features.chunked_log_probs.deferred.deferring", deferring):
        return body(lambda model, logits_processor: logits_processor, "model", logits_processor="processor")


@demonstrates("verl.workers.actor.megatron_actor:vocab_parallel_entropy", CHUNKED_LOG_PROBS)
def the_entropy_comes_with_the_log_probs(body):
    logits = DeferredLogits(torch.zeros(1, 1, 3), torch.zeros(4, 3), torch.tensor([[1]]), None, 1)
    found = (torch.tensor([[-1.0]]), torch.tensor([[0.5]]))
    with mock.patch.object(DeferredLogits, "_compute", return_value=found):
        return str(body(lambda logits: "upstream", logits))
