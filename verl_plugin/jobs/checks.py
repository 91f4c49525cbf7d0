"""Rejects a job that cannot run, before Ray starts: verl's own checks, and errors that verl finds only on the dies."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from post_training.models.families import decoder_values, family_of, table_for, variant_findings
from post_training.plan.verl_0_9_jobs import stage_layers
from post_training.report.run_folder import at
from post_training.user_files import FileError, read_object
from verl_plugin.alltoallv.settings import (
    EXTENSION,
    EXTENSION_KEY,
    LIBRARY,
    SETTINGS_KEY,
    AlltoallvSettings,
)
from verl_plugin.batch_invariance.checks import ULYSSES, invariance_model_problems, invariance_problems
from verl_plugin.heartbeats.settings import ENGINES as HEARTBEATS
from verl_plugin.heartbeats.settings import hang_problems
from verl_plugin.jobs.asynchronous import asynchronous_problems, rollout_dies
from verl_plugin.jobs.composition import JobError
from verl_plugin.jobs.context import (
    context_model_problems,
    context_problems,
    parts_of_sequences,
    ulysses_problems,
)
from verl_plugin.jobs.images import image_problems
from verl_plugin.jobs.megatron_models import megatron_model_problems, option_problems
from verl_plugin.jobs.tokenizers import tokenizer_problems
from verl_plugin.libraries import LIBRARIES_KEY, libraries_of
from verl_plugin.mindspeed_layers import overlap_problems
from verl_plugin.offload.checks import PEAKS, offload_problems
from verl_plugin.onpolicy.checks import onpolicy_model_problems, onpolicy_problems, registration_problems
from verl_plugin.resume.checks import resume_problems
from verl_plugin.rollout import BACKEND, BACKEND_KEY, WORKER, WORKER_KEY
from verl_plugin.rollout.sync_window import EXECUTOR, EXECUTOR_KEY, SyncWindowSettings
from verl_plugin.rollout.sync_window import SETTINGS_KEY as WINDOWS_KEY
from verl_plugin.routing_replay.checks import replay_model_problems, replay_problems
from verl_plugin.sentences import invalid
from verl_plugin.step_record.checks import record_problems
from verl_plugin.trainer_modes import MODE_KEY, ONE_FORWARD, RECORDED

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_MEGATRON = f"{_ACTOR}.megatron"
# Keys that verl multiplies or divides by.
_COUNTS = (
    "data.train_batch_size", "data.max_prompt_length", "data.max_response_length", "trainer.nnodes",
    "trainer.n_gpus_per_node", f"{_ACTOR}.ppo_mini_batch_size", f"{_ROLLOUT}.n",
    f"{_ROLLOUT}.tensor_model_parallel_size", f"{_ROLLOUT}.max_num_batched_tokens", f"{_ROLLOUT}.max_num_seqs",
    f"{_ROLLOUT}.data_parallel_size", f"{_ROLLOUT}.expert_parallel_size",
)  # fmt: skip
_MEGATRON_COUNTS = tuple(
    f"{_MEGATRON}.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model")
)
# Most tokens of a micro batch, by the key that makes verl fill micro batches up to it.
_TOKEN_LIMITS = {
    f"{_ACTOR}.ppo_max_token_len_per_gpu": f"{_ACTOR}.use_dynamic_bsz",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": f"{_ROLLOUT}.log_prob_use_dynamic_bsz",
    f"{_REF}.log_prob_max_token_len_per_gpu": f"{_REF}.log_prob_use_dynamic_bsz",
}
_ENGINES = ("fsdp2", "megatron")


def check_job(config: Any, model: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Check a composed job.

    Args:
        config: as `compose_job` returns it.
        model: the model's config.json; None reads it from `actor_rollout_ref.model.path` if that is a folder.

    Returns:
        The configuration without interpolations.

    Raises:
        JobError: the job cannot run; the message names the key, its value and what to set.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]  # a mapping
    except OmegaConfBaseException as error:
        raise JobError(str(error).splitlines()[0]) from error
    for problem in _problems(plain):
        raise JobError(problem)
    _check_by_verl(config)
    model = _read_model(plain) if model is None else model
    for problem in () if model is None else _model_problems(plain, model):
        raise JobError(problem)
    return plain


def dies_of(config: Mapping[str, Any]) -> int:
    """Return the number of dies that a job trains on."""
    return int(config["trainer"]["nnodes"] * config["trainer"]["n_gpus_per_node"])


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield errors that do not depend on the model. Take only the first: later checks rely on earlier ones."""
    strategy = at(config, f"{_ACTOR}.strategy")
    if strategy not in _ENGINES:
        yield invalid(f"{_ACTOR}.strategy", strategy, "no job of this stack trains with it", " or ".join(_ENGINES))
    for key in (*_COUNTS, *(_MEGATRON_COUNTS if strategy == "megatron" else ULYSSES)):
        value = at(config, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield invalid(key, value, "not a count", "a whole number, at least 1")
    share = at(config, f"{_ROLLOUT}.gpu_memory_utilization")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        yield invalid(f"{_ROLLOUT}.gpu_memory_utilization", share, "not a share", "a number between 0 and 1")
    yield from _batch_problems(config)
    yield from asynchronous_problems(config)
    yield from _placement_problems(config, strategy)
    yield from _weight_problems(config)
    yield from _order_problems(config)
    yield from _worker_problems(config)
    yield from _window_problems(config)
    yield from replay_problems(config)
    yield from offload_problems(config)
    yield from resume_problems(config)
    yield from registration_problems(config)
    yield from onpolicy_problems(config)
    yield from record_problems(config)
    yield from hang_problems(config)
    yield from invariance_problems(config)


def _batch_problems(config: Mapping[str, Any]) -> Iterator[str]:
    batch, mini = config["data"]["train_batch_size"], at(config, f"{_ACTOR}.ppo_mini_batch_size")
    if batch % mini:
        yield invalid(
            f"{_ACTOR}.ppo_mini_batch_size",
            mini,
            f"{batch} prompts of a step are not a multiple",
            f"a divisor of {batch}",
        )
    longest = config["data"]["max_prompt_length"] + config["data"]["max_response_length"]
    key = f"{_ROLLOUT}.max_num_batched_tokens"
    if not at(config, f"{_ROLLOUT}.enable_chunked_prefill") and at(config, key) < longest:
        yield invalid(key, at(config, key), f"a sequence may have {longest} tokens", f"{longest} or more")
    for key, is_dynamic in _TOKEN_LIMITS.items():
        limit, parts = at(config, key), parts_of_sequences(config, "ref" if key.startswith(_REF) else "actor")
        shared = f", and {parts} dies share it" if parts > 1 else ""
        if at(config, is_dynamic) and (limit is None or limit * parts < longest):
            reason = f"a sequence may have {longest} tokens{shared}"
            yield invalid(key, limit, reason, f"{-(-longest // parts)} or more")


def _placement_problems(config: Mapping[str, Any], strategy: str) -> Iterator[str]:
    dies = dies_of(config)
    yield from _instance_problems(config, *rollout_dies(config))
    if strategy != "megatron":
        yield from ulysses_problems(config, dies)
        yield from _replica_problems(config, dies // parts_of_sequences(config))
        return
    megatron = at(config, _MEGATRON)
    tp, pp, cp = (megatron[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "context"))
    ep, etp = megatron["expert_model_parallel_size"], megatron["expert_tensor_parallel_size"] or tp
    yield from context_problems(config)
    yield from option_problems(config)
    yield from overlap_problems(config)
    if dies % (tp * pp):
        yield invalid(_MEGATRON_COUNTS[0], tp, f"{dies} dies are not a multiple of TP{tp} x PP{pp}", "a divisor")
    if dies % (tp * pp * cp):
        reason = f"{dies} dies are not a multiple of TP{tp} x CP{cp} x PP{pp}"
        yield invalid(_MEGATRON_COUNTS[2], cp, reason, f"a divisor of {dies // (tp * pp)}")
    yield from _replica_problems(config, dies // (tp * pp * cp))
    if etp != tp and (etp != 1 or ep % tp):
        key, reason = (
            f"{_MEGATRON}.expert_tensor_parallel_size",
            f"alltoallv has no layout for it with TP{tp} and EP{ep}",
        )
        yield invalid(key, etp, reason, f"{tp}, or to 1 with experts over a multiple of {tp} dies")
    if dies % (ep * etp * pp):
        reason = f"{dies} dies are not a multiple of EP{ep} x ETP{etp} x PP{pp}"
        yield invalid(_MEGATRON_COUNTS[3], ep, reason, f"a divisor of {dies // (etp * pp) or 1}")


def _instance_problems(config: Mapping[str, Any], dies: int, node: int) -> Iterator[str]:
    """Check that a vLLM instance's TP x DP dies are on one node, or are whole nodes: verl starts a server on each."""
    rollout = at(config, _ROLLOUT)
    tp, dp, ep = (rollout[f"{name}_parallel_size"] for name in ("tensor_model", "data", "expert"))
    size, tp_key = tp * dp, f"{_ROLLOUT}.tensor_model_parallel_size"
    key, value, others = (f"{_ROLLOUT}.data_parallel_size", dp, tp) if dp > 1 else (tp_key, tp, 1)
    if dies % size:
        of_instances = f"{dies} dies are not a multiple" + (f" of TP{tp} x DP{dp}" if dp > 1 else "")
        yield invalid(key, value, of_instances, f"a divisor of {dies // others or 1}")
    if size > node and size % node:
        yield invalid(key, value, f"the {size} dies of an instance do not fill whole nodes of {node}", "a multiple")
    if size < node < dies and node % size:
        reason = f"an instance of {size} dies would lie on two nodes of {node}"
        yield invalid(key, value, reason, f"a divisor of {node // others or 1}")
    if dp > 1 and min(node, size) % tp:
        yield invalid(tp_key, tp, f"{node} dies of a node are not a multiple", f"a divisor of {node}")
    if ep not in (1, size):
        reason = f"vLLM spreads experts over all {size} dies of an instance, or splits each over them"
        yield invalid(f"{_ROLLOUT}.expert_parallel_size", ep, reason, f"{size} or 1")


def _replica_problems(config: Mapping[str, Any], replicas: int) -> Iterator[str]:
    """Check that the answers of a mini batch divide evenly among the data-parallel replicas of training."""
    mini, answers = at(config, f"{_ACTOR}.ppo_mini_batch_size"), at(config, f"{_ROLLOUT}.n")
    if mini * answers % replicas:
        reason = f"its {mini * answers} answers are not a multiple of {replicas} replicas"
        yield invalid(f"{_ACTOR}.ppo_mini_batch_size", mini, reason, f"a multiple of {replicas}")


def _weight_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Check that both alltoallv keys are set or neither is, and check the plugin's options."""
    libraries, vllm = libraries_of(config), at(config, f"{_ROLLOUT}.engine_kwargs.vllm") or {}
    exports, imports = LIBRARY in libraries, vllm.get("worker_extension_cls") == EXTENSION
    if imports and not exports:
        yield invalid(LIBRARIES_KEY, libraries, f"vLLM's workers wait for alltoallv ({EXTENSION_KEY})", f"[{LIBRARY}]")
    if exports and not imports:
        yield invalid(EXTENSION_KEY, vllm.get("worker_extension_cls"), "training sends by alltoallv", EXTENSION)
    try:
        AlltoallvSettings.from_additional_config(vllm.get("additional_config"))
    except (TypeError, AttributeError):
        yield invalid(SETTINGS_KEY, vllm.get("additional_config"), "not a group of options", "{}")
    except ValueError as error:
        yield str(error)


def _order_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Require modules that observe the hand-over of weights behind alltoallv, whose export calls none before it."""
    libraries = libraries_of(config)
    for name in (HEARTBEATS, PEAKS):
        if LIBRARY in libraries and name in libraries and libraries.index(name) < libraries.index(LIBRARY):
            reason = f"{name} sees the hand-over of weights only behind {LIBRARY}"
            yield invalid(LIBRARIES_KEY, libraries, reason, f"a list with {name} behind {LIBRARY}")


def _worker_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Reject a worker or all-to-all backend with which vLLM-Ascend loses tokens or computes wrong ones."""
    vllm = at(config, f"{_ROLLOUT}.engine_kwargs.vllm") or {}
    if at(config, f"{_ROLLOUT}.expert_parallel_size") > 1 and vllm.get("worker_cls") != WORKER:
        reason = "vLLM-Ascend 0.23 loses tokens when experts are on several dies"
        yield invalid(WORKER_KEY, vllm.get("worker_cls"), reason, WORKER)
    backend = vllm.get("all2all_backend")
    if vllm.get("worker_cls") == WORKER and backend != BACKEND:
        reason = f"only {WORKER_KEY} makes vLLM-Ascend 0.23 set it, and tokens are wrong with vLLM's default"
        yield invalid(BACKEND_KEY, backend, reason, BACKEND)


def _window_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Reject sync windows where an instance of vLLM cannot have them."""
    rollout = at(config, _ROLLOUT)
    vllm = at(config, f"{_ROLLOUT}.engine_kwargs.vllm") or {}
    if vllm.get("distributed_executor_backend") != EXECUTOR:
        return
    tp, dp = rollout["tensor_model_parallel_size"], rollout["data_parallel_size"]
    mode = at(config, MODE_KEY)
    reasons = {
        "there is only one engine": dp == 1,
        f"over several nodes it needs {MODE_KEY}={ONE_FORWARD} or {RECORDED}, not {mode}": tp * dp
        > rollout_dies(config)[1]
        and mode not in (ONE_FORWARD, RECORDED),
        f"windows need {WORKER_KEY}={WORKER}": vllm.get("worker_cls") != WORKER,
    }
    for reason, applies in reasons.items():
        if applies:
            yield invalid(EXECUTOR_KEY, EXECUTOR, reason, "mp")
    try:
        SyncWindowSettings.from_additional_config(vllm.get("additional_config"))
    except (TypeError, AttributeError):
        yield invalid(WINDOWS_KEY, (vllm.get("additional_config") or {}).get("sync_windows"), "not a group", "{}")
    except ValueError as error:
        yield str(error)


def _check_by_verl(config: Any) -> None:
    """Run the checks that verl's own entry point makes before it starts Ray."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validate_config(config, need_reference_policy(config), need_critic(config))
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    except Exception as error:
        cause = error.__cause__ or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        raise JobError(f"verl rejects the configuration: {lines[0] if lines else type(cause).__name__}") from error
    finally:
        logging.disable(logging.NOTSET)


def _read_model(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the config.json in the model's folder, or None if this machine does not have it."""
    path = at(config, "actor_rollout_ref.model.path")
    file = Path(str(path), "config.json")
    if path is None or not file.is_file():
        return None
    try:
        return read_object(file)
    except FileError as error:
        raise JobError(
            f"actor_rollout_ref.model.path={path} is invalid: {error}. Set it to a model's folder."
        ) from error


def _model_problems(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the job cannot run with this model."""
    try:
        family, values = family_of(model), decoder_values(model)
        yield from variant_findings(family, values)
        table_for(model)
    except ValueError as error:
        yield str(error)
        return
    yield from image_problems(config, family)
    heads, experts = values["num_attention_heads"], values.get("num_experts") or values.get("n_routed_experts") or 0
    keys = [f"{_ROLLOUT}.tensor_model_parallel_size"]
    if at(config, f"{_ACTOR}.strategy") == "megatron":
        keys.append(_MEGATRON_COUNTS[0])
        ep = at(config, _MEGATRON_COUNTS[3])
        if experts % ep or (ep > 1 and not experts):
            yield invalid(_MEGATRON_COUNTS[3], ep, f"the model has {experts} experts", "a divisor" if experts else "1")
        try:
            stage_layers(at(config, _MEGATRON), values["num_hidden_layers"])
        except ValueError as error:
            yield str(error)
        yield from megatron_model_problems(config, model)
    engines = at(config, f"{_ROLLOUT}.data_parallel_size")
    if engines > 1 and not experts:
        reason = "vLLM gives the engines of a model without experts no ranks of their own"
        yield invalid(f"{_ROLLOUT}.data_parallel_size", engines, reason, "1, which gives as many instances")
    served = at(config, f"{_ROLLOUT}.expert_parallel_size")
    if served > max(experts, 1):
        yield invalid(f"{_ROLLOUT}.expert_parallel_size", served, f"the model has {experts} experts", "1 or fewer dies")
    for key in keys:
        if heads % at(config, key):
            yield invalid(key, at(config, key), f"the model has {heads} attention heads", f"a divisor of {heads}")
    yield from context_model_problems(config, model)
    yield from replay_model_problems(config, model)
    yield from onpolicy_model_problems(config, model)
    yield from invariance_model_problems(config, model)
    longest = config["data"]["max_prompt_length"] + config["data"]["max_response_length"]
    positions, answer = values["max_position_embeddings"], config["data"]["max_response_length"]
    if longest > positions:
        reason = f"with the prompt a sequence has {longest} tokens, and the model {positions} positions"
        yield invalid("data.max_response_length", answer, reason, f"{positions - longest + answer} or less")
    # Last, because it takes seconds.
    yield from tokenizer_problems(at(config, "actor_rollout_ref.model"), model.get("model_type"), config["data"])
