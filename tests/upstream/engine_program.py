"""Ranks that compare MindSpeed-LLM, started as verl starts a worker, with transformers, in one layout.

FOLDER holds request.json, and checkpoint/ with reference.pt as tests/megatron_patches writes them. Each rank writes
its results to ``rank<n>.json``. MindSpeed changes Megatron once per process, so each layout has its own processes.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer

import overlay
from tests.post_training.models.megatron.training_models_program import (
    Layout,
    Trial,
    compare_layout,
    compare_optimizer_step,
    logits_error,
    start_layout,
    stepped_weights,
)
from tests.verl_patches.features.chunked_log_probs.model_program import compare
from verl_patches.features import settings
from verl_patches.features.mindspeed import megatron_adaptor
from verl_patches.trainer.main_ppo import compose

CHECKPOINTING = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint"
RECOMPUTE = (
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    f"{CHECKPOINTING}_granularity=full",
    f"{CHECKPOINTING}_method=block",
    f"{CHECKPOINTING}_num_layers=1",
)


def start_engine(checkpoint: Path, layout: Layout, fused: bool, *overrides: str) -> list[str]:
    """Start the engine as a worker does. Return the names that MindSpeed alone would leave on Megatron's functions."""
    megatron = "actor_rollout_ref.actor.megatron"
    config = compose(
        "rehearsal",
        [
            f"actor_rollout_ref.model.path={checkpoint}",
            "actor_rollout_ref.overlay.precision=float32",
            "actor_rollout_ref.overlay.mindspeed.engine=on",
            f"actor_rollout_ref.overlay.mindspeed.fused_operators={fused}",
            f"{megatron}.tensor_model_parallel_size={layout.tensor}",
            f"{megatron}.pipeline_model_parallel_size={layout.pipeline}",
            f"{megatron}.expert_model_parallel_size={layout.expert}",
            f"{megatron}.override_transformer_config.num_layer_list={layout.stages or 'null'}",
            *(RECOMPUTE if layout.recompute else ()),
            *overrides,
        ],
    )
    settings.activate(settings.OverlaySettings.from_config(config.actor_rollout_ref))
    rebound: list[str] = []

    def remembered() -> list[str]:
        rebound.extend(rebind_copies())
        return rebound

    rebind_copies = megatron_adaptor.rebind_copies
    with mock.patch.object(megatron_adaptor, "rebind_copies", remembered):
        megatron_adaptor.start_for(config.actor_rollout_ref, settings.current())
    return rebound


@contextmanager
def sequences_run_into_each_other() -> Iterator[None]:
    """A fault: attention sees one long sequence."""
    from post_training.models.mindspeed import packed_gpt_model

    upstream = packed_gpt_model.set_actual_seq_len
    with mock.patch.object(packed_gpt_model, "set_actual_seq_len", lambda ends: upstream(ends[-1:])):
        yield


@contextmanager
def recomputation_cuts_sequences() -> Iterator[None]:
    """A fault: the recomputation in backward gets other sequence ends than the micro batch had."""
    from mindspeed.utils import set_actual_seq_len

    def in_halves(ends: list[int]) -> None:
        set_actual_seq_len([ends[-1] // 2, ends[-1]])

    with mock.patch("mindspeed_llm.core.tensor_parallel.layers.set_actual_seq_len", in_halves):
        yield


def with_faults(folder: Path, layout: Layout, reference: dict[str, Any]) -> dict[str, float]:
    """Return errors that the comparison must detect. Sequences can run together if the batch is one micro batch."""
    if layout.recompute:
        with recomputation_cuts_sequences():
            gradients = compare_layout(folder, layout, reference)["gradients"]
        return {"recomputation with other ends": max(gradients.values())}
    trial, found = Trial(folder / "checkpoint", layout), {}
    for fault, broken in (("nothing", nullcontext), ("sequences run into each other", sequences_run_into_each_other)):
        with broken():
            logits = trial.run(reference["batch"], backward=False, together=True)
        found[fault] = logits_error(logits, reference) or 0.0
    return found


def types_of_biases(folder: Path, layout: Layout) -> dict[str, str]:
    """Return the dtypes of the routers' biases in a bfloat16 model, cast by Megatron's Float16Module as verl wraps it.

    The engine was started for float32, so its configuration says float32 until here.
    """
    from megatron.core.transformer.module import Float16Module  # the engine may have replaced it

    trial = Trial(folder / "checkpoint", layout)
    trial.config.bf16 = True
    model = Float16Module(trial.config, trial.module)
    assert torch.bfloat16 in {each.dtype for each in model.parameters()}
    return {name: str(held.dtype) for name, held in model.named_buffers() if name.endswith("expert_bias")}


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    request = json.loads((folder / "request.json").read_text())
    layout = Layout(**request["layout"])
    own = torch.compile
    rebound = start_engine(folder / "checkpoint", layout, request["fused"])
    dist.init_process_group("hccl")
    reference = torch.load(folder / "reference.pt", weights_only=True)
    norm, reference["stepped"] = stepped_weights(folder, reference["gradients"])
    start_layout(layout)
    results: dict[str, Any] = {
        "rebound": rebound,
        "left": megatron_adaptor.rebind_copies(),
        "adam": megatron_optimizer.Adam.__module__,
        "compiler is torch's": torch.compile is own,
        "layout": compare_layout(folder, layout, reference),
        "step": compare_optimizer_step(folder, layout, reference) | {"expected norm": norm},
        "faults": with_faults(folder, layout, reference),
        "biases": types_of_biases(folder, layout),
        "deferred": compare(folder / "checkpoint", layout, torch.float32, reference["batch"]),
        "report": overlay.assert_effective().as_dict(),
    }
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
