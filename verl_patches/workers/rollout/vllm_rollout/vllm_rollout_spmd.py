"""Patches of verl's rollout: new samples every time, only from whole weights, with log-probs and true answer ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.answer_ends.feature import ANSWER_ENDS
from verl_patches.features.compatibility.feature import ROLLOUT_SEED
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.partial_rollout.feature import PARTIAL_ROLLOUT
from verl_patches.features.request_noise.feature import REQUEST_NOISE
from verl_patches.features.reshard.feature import WHOLE_WEIGHTS

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from verl import DataProto
    from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout


@wrap(
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout.__init__",
    feature=ROLLOUT_SEED,
    evidence="executed",
    why="verl copies rollout.seed into every request, which then samples with the same noise at every step, and gives "
    "all data-parallel engines one seed",
    upstream="https://github.com/verl-project/verl/pull/2646",
    remove_when="verl seeds the engine, not the requests",
    relies_on=["vllm.sampling_params:SamplingParams"],
)
def init(
    upstream: Callable[..., None],
    self: vLLMRollout,
    model_path: str,
    config: DictConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_hf_config: PretrainedConfig,
    **options: Any,
) -> None:
    if "device_mesh" not in options:  # one engine, outside of a worker
        return upstream(self, model_path, config, tokenizer, model_hf_config, **options)
    import copy

    engines = options["device_mesh"]["dp"]
    seeded = copy.deepcopy(config)
    seeded.seed = config.seed * engines.size() + engines.get_local_rank()
    upstream(self, model_path, seeded, tokenizer, model_hf_config, **options)
    self.config = config
    self.sampling_params.seed = None


@wrap(
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout.__init__",
    feature=ANSWER_ENDS,
    evidence="executed",
    why="verl cuts answers only by the generation configuration, but vLLM also stops at the tokenizer's end token",
    upstream="https://github.com/volcengine/verl/issues/212",
    remove_when="the pinned verl takes the ends of answers from its engine",
    relies_on=["vllm.sampling_params:SamplingParams.update_from_generation_config"],
    outside=["rollout_seed"],
)
def init_with_end_tokens(
    upstream: Callable[..., None],
    self: vLLMRollout,
    model_path: str,
    config: DictConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_hf_config: PretrainedConfig,
    **options: Any,
) -> None:
    from verl_patches.features.answer_ends.ends import end_tokens_of, stop_at, without_stop_tokens

    upstream(self, model_path, without_stop_tokens(config), tokenizer, model_hf_config, **options)
    self.config = config
    self.end_tokens = end_tokens_of(config, model_path, tokenizer)
    stop_at(self.sampling_params, self.end_tokens, self.inference_engine.llm_engine)


@wrap(
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout.generate_sequences",
    feature=ANSWER_ENDS,
    evidence="executed",
    why="verl cuts answers at the end tokens of the generation configuration: it trains on padding where the engine "
    "stopped at another token, and fails with a TypeError where it defines none",
    upstream="https://github.com/volcengine/verl/issues/212",
    remove_when="the pinned verl takes the ends of answers from its engine",
    inside=["measure", "whole_weights", "partial_rollout", "request_noise"],
)
def generate_sequences_to_their_ends(
    upstream: Callable[..., DataProto], self: vLLMRollout, prompts: DataProto, **options: Any
) -> DataProto:
    from verl_patches.features.answer_ends.mask import lengths_of, masked_to_lengths
    from verl_patches.features.measure.rollout_log_probs import observed_outputs

    # -1 is no token, so upstream cuts nowhere; it would not take an empty list.
    prompts.meta_info["eos_token_id"] = list(self.end_tokens.tokens) or [-1]
    with observed_outputs(self.inference_engine) as outputs:
        generated = upstream(self, prompts, **options)
    width = generated.batch["responses"].size(1)
    attention = generated.batch["attention_mask"]
    generated.batch["attention_mask"] = masked_to_lengths(attention, width, lengths_of(outputs))
    return generated


@wrap(
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout.generate_sequences",
    feature=WHOLE_WEIGHTS,
    evidence="executed",
    why="after a reshard that failed half-way some weights are new and some old, and verl samples from the mixture",
    upstream="not forwarded: part of this project's features",
    remove_when="verl refuses to generate after a failed weight transfer",
)
def generate_sequences(
    upstream: Callable[..., DataProto], self: vLLMRollout, prompts: DataProto, **options: Any
) -> DataProto:
    from verl_patches.features.reshard.generation import process_generation

    process_generation().require_whole()
    return upstream(self, prompts, **options)


@wrap(
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout.generate_sequences",
    feature=MEASURE,
    evidence="executed",
    why="verl at the cluster's commit asks vLLM for the log-probs of its samples and drops them; without them nothing "
    "shows how far rollout and training differ; and verl 0.4.0 returns those of the draw, which differ from "
    "training's where top-k, top-p or min-p remove tokens",
    upstream="https://github.com/verl-project/verl/pull/1712",
    remove_when="the cluster's verl returns rollout_log_probs",
)
def generate_sequences_with_log_probs(
    upstream: Callable[..., DataProto], self: vLLMRollout, prompts: DataProto, **options: Any
) -> DataProto:
    from verl_patches.features.measure.rollout_log_probs import (
        draws_are_narrowed,
        kept_probabilities,
        log_probs_of,
        observed_outputs,
    )
    from verl_patches.features.measure.step_record import current_record

    with observed_outputs(self.inference_engine) as outputs:
        generated = upstream(self, prompts, **options)
    responses, narrowed = generated.batch["responses"], draws_are_narrowed(outputs)
    if narrowed or "rollout_log_probs" not in generated.batch.keys():
        generated.batch["rollout_log_probs"] = log_probs_of(outputs, responses.size(1)).to(responses.device)
    if narrowed and not prompts.meta_info.get("validate"):
        current_record().drew(*kept_probabilities(outputs))
    return generated


@wrap(
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout.generate_sequences",
    feature=PARTIAL_ROLLOUT,
    why="vLLM's generate ends with its last answer, and begins every answer anew",
    upstream="not forwarded: verl has partial rollouts in its asynchronous trainers only",
    remove_when="the pinned verl's synchronous rollout can suspend and continue answers",
    outside=["measure", "whole_weights"],
)
def generate_sequences_in_parts(
    upstream: Callable[..., DataProto], self: vLLMRollout, prompts: DataProto, **options: Any
) -> DataProto:
    from verl_patches.features.partial_rollout.columns import going_on, take_rows, with_progress

    begun = take_rows(prompts)
    if begun is None:
        return upstream(self, prompts, **options)
    with going_on(self.inference_engine, *begun) as outputs:
        generated = upstream(self, prompts, **options)
    return with_progress(generated, outputs)


@wrap(
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout.generate_sequences",
    feature=REQUEST_NOISE,
    why="verl passes vLLM one set of sampling parameters for all prompts, but every prompt has its own seed",
    upstream="not forwarded: part of this project's features",
    remove_when="vLLM gives every request its own random numbers",
    outside=["measure", "whole_weights"],
)
def generate_sequences_with_seeds(
    upstream: Callable[..., DataProto], self: vLLMRollout, prompts: DataProto, **options: Any
) -> DataProto:
    from verl_patches.features.request_noise.seeds import seeded, take_seeds

    with seeded(self.inference_engine, take_seeds(prompts)):
        return upstream(self, prompts, **options)
