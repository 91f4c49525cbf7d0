"""A worker's result for published models in the shipped jobs, and the result of upstream's own builders.

The process stands for rank 0 of the job's dies. Its groups are Megatron's own, over a process group that sends
nothing, and its modules are built with all widths but without memory. Arguments: a folder with a subfolder per model
that holds its config.json; a JSON file with the names of these subfolders by job; and the output file, JSON by job and
model: the worker's answer and the builders'.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForVision2Seq, PreTrainedModel

import verl_patches.prelude_patch  # noqa: F401  (before Megatron)
from overlay import ConfigurationError
from post_training.layouts.model_tensors import train_tensors
from post_training.layouts.placements import train_placement
from post_training.layouts.published_names import published_name
from post_training.models.families import table_for
from tests.verl_patches.trainer.shipped_jobs import JOBS
from verl_patches.trainer.main_ppo import compose
from verl_patches.workers.model_check import check_workers_model

from megatron.core import parallel_state  # isort: skip


def main() -> None:
    """Check the models of every job."""
    folder, asked_for, answers = map(Path, sys.argv[1:])
    models = json.loads(asked_for.read_text())
    found = {
        job: of_job(job, overrides, {name: folder / name for name in models[job]}) for job, overrides in JOBS.items()
    }
    answers.write_text(json.dumps(found))


def of_job(job: str, overrides: tuple[str, ...], models: dict[str, Path]) -> dict[str, dict[str, str | None]]:
    """Return the answers of one job."""
    name = job.split()[0]
    config = OmegaConf.to_container(compose(name, ["actor_rollout_ref.model.path=/absent", *overrides]), resolve=True)
    node, trainer = config["actor_rollout_ref"], config["trainer"]
    dies = trainer["nnodes"] * trainer["n_gpus_per_node"]
    os.environ["WORLD_SIZE"] = str(dies)
    begin_groups(node, dies)
    try:
        return {
            model: {
                "worker": rejection(
                    partial(check_workers_model, {**node, "model": {**node["model"], "path": str(path)}})
                ),
                "built": rejection(partial(build, node, path)),
            }
            for model, path in models.items()
        }
    finally:
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def begin_groups(node: dict[str, Any], dies: int) -> None:
    """Create Megatron's groups of rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dies)
    if "megatron" not in node["actor"]:
        return
    make, sizes = dist.new_group, node["actor"]["megatron"]
    with mock.patch.object(dist, "new_group", lambda ranks=None, backend=None, **options: make(ranks)):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes["tensor_model_parallel_size"],
            pipeline_model_parallel_size=sizes["pipeline_model_parallel_size"],
            expert_model_parallel_size=sizes["expert_model_parallel_size"],
        )


def rejection(call: Callable[[], None]) -> str | None:
    """Return the message of a failed check, the type and text of another exception, or None."""
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    except Exception as error:  # upstream raises anything
        return f"{type(error).__name__}: {error}"
    return None


def build(node: dict[str, Any], path: Path) -> None:
    """Build everything that a worker builds from config.json, without memory for the weights."""
    hf_config = AutoConfig.from_pretrained(path)
    serve(node, hf_config)
    if "megatron" in node["actor"]:
        build_stages(node, hf_config)
    else:
        build_sharded(path)


def serve(node: dict[str, Any], hf_config: Any) -> None:
    """Run vLLM's own checks of a model, and its Qwen models' assertion about sliding windows."""
    from vllm.config import ModelConfig, _get_and_verify_max_len

    rollout = node["rollout"]
    longest = rollout["max_model_len"] or rollout["prompt_length"] + rollout["response_length"]
    model = SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config, architectures=hf_config.architectures)
    model._verify_with_expert_parallelism = partial(ModelConfig._verify_with_expert_parallelism, model)
    scaling = getattr(hf_config, "rope_scaling", None)
    if scaling and "type" in scaling:  # as vLLM does when it reads the file
        hf_config.rope_scaling = {"rope_type": scaling["type"], **scaling}
    _get_and_verify_max_len(hf_config, longest, False, None)
    parallel = SimpleNamespace(
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=rollout["tensor_model_parallel_size"],
        enable_expert_parallel=node["overlay"]["rollout"]["expert_parallel_size"] > 1,
        pipeline_parallel_size=1,
    )
    model.seed = 0
    ModelConfig.verify_with_parallel_config(model, parallel)
    if hasattr(hf_config, "vision_config"):
        split_vision(hf_config.vision_config, rollout["tensor_model_parallel_size"])
    assert ModelConfig.get_hf_config_sliding_window(model) is None, "a sliding window"


def split_vision(vision_config: Any, tensor_parallel_size: int) -> None:
    """Build vLLM's layers of a vision tower on one rank."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionMLP

    size = mock.patch.object(linear, "get_tensor_model_parallel_world_size", lambda: tensor_parallel_size)
    rank = mock.patch.object(linear, "get_tensor_model_parallel_rank", lambda: 0)
    with size, rank, torch.device("meta"):
        Qwen2_5_VisionMLP(vision_config.hidden_size, vision_config.intermediate_size, bias=True)


def build_stages(node: dict[str, Any], hf_config: Any) -> None:
    """Build the first and the last stage as verl's worker does, and locate every shard of the layout in them."""
    from verl.models.mcore.registry import hf_to_mcore_config, init_mcore_model

    sizes = node["actor"]["megatron"]
    options = sizes["override_transformer_config"]
    config = hf_to_mcore_config(hf_config, torch.bfloat16, **options, perform_initialization=False)
    placement, stages = train_placement(config), sizes["pipeline_model_parallel_size"]
    for stage in sorted({0, stages - 1}):
        parallel_state.set_pipeline_model_parallel_rank(stage)
        rank = stage * placement.tp * placement.dp
        # For a tied embedding Megatron sums the two copies.
        with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.object(dist, "all_reduce"):
            tied = bool(hf_config.tie_word_embeddings)
            model = init_mcore_model(
                config, hf_config, stage == 0, stage == stages - 1, share_embeddings_and_output_weights=tied
            )
            tensors = train_tensors([model])
        for shard in table_for(hf_config).megatron(placement, rank):
            shard.locate(tensors)
    parallel_state.set_pipeline_model_parallel_rank(0)


@cache
def build_sharded(path: Path) -> None:
    """Check that transformers' model with a few layers has the layout's tensors, whatever the job."""
    hf_config = AutoConfig.from_pretrained(path)
    hf_config.num_hidden_layers = getattr(hf_config, "first_k_dense_replace", 0) + 1
    # The class is chosen as in verl's worker.
    sees = type(hf_config) in AutoModelForVision2Seq._model_mapping
    kind = AutoModelForVision2Seq if sees else AutoModelForCausalLM
    # There is no memory to draw initial values in; parameters are still tied.
    with torch.device("meta"), mock.patch.object(PreTrainedModel, "initialize_weights"):
        model = kind.from_config(hf_config, torch_dtype=torch.bfloat16, attn_implementation="eager")
    buffers = {name: tuple(each.shape) for name, each in model.named_buffers() if name.endswith("correction_bias")}
    held = {published_name(name) if sees else name: each for name, each in model.named_parameters()}
    shapes = {name: tuple(each.shape) for name, each in held.items()} | buffers
    assert shapes == dict(table_for(hf_config).shapes), "other tensors than the layout's"


if __name__ == "__main__":
    main()
