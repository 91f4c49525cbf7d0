"""Ranks that train a model with whole logits and with deferred ones; see test_deferred.py.

For each layout, every rank writes how far the log-probs, entropy and gradients of the two differ, and the number of
elements of the largest tensor that its output layer returned.
"""

# Its first import is the prelude.
from tests.post_training.models.megatron.training_models_program import Layout, Trial, start_layout

# isort: split
import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.workers.actor.megatron_actor as actor
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from verl.models.mcore import get_mcore_forward_fn

from verl_patches.features import settings
from verl_patches.features.chunked_log_probs.feature import ChunkedLogProbsSettings

TEMPERATURE = 0.9
LAYOUTS = {
    "deepseek_v3": [
        (Layout("tensor2", tensor=2), torch.float32),
        (Layout("tensor2_pipeline2", tensor=2, pipeline=2, stages=[2, 1]), torch.float32),
        (Layout("tensor4_bfloat16", tensor=4), torch.bfloat16),
    ],
    "tied_qwen2": [(Layout("tied_tensor2", tensor=2), torch.float32)],
}


def switch(enabled: bool) -> None:
    """Turn the feature on or off, set the rollout temperature, and keep the other settings."""
    chosen = ChunkedLogProbsSettings(enabled=enabled, chunk_bytes=1)
    settings.activate(
        dataclasses.replace(settings.current(), chunked_log_probs=chosen, rollout_temperature=TEMPERATURE)
    )


def forward_step(
    batches: Any, model: Any, *, hf_config: Any, sequence_parallel: bool, found: list[dict[str, torch.Tensor]]
) -> tuple[Any, Callable]:
    """Run a forward step as verl's actor does, with a loss of log-probs and entropy."""
    batch = {name: value.npu() for name, value in next(batches).items()}
    label, mask = batch["input_ids"].roll(-1, 1), batch["attention_mask"].clone()
    mask[:, :2] = False

    def processor(logits: Any, label: torch.Tensor, label_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        entropy = actor.vocab_parallel_entropy(logits)
        log_probs = actor.vocab_parallel_log_probs_from_logits(logits, label)
        return {"entropy": entropy, "log_probs": log_probs.masked_fill(~label_mask, 0.0)}

    output = get_mcore_forward_fn(hf_config)(
        model, batch["input_ids"], batch["attention_mask"], batch["position_ids"], sequence_parallel=sequence_parallel,
        logits_processor=processor, logits_processor_args={"label": label, "label_mask": mask},
    )  # fmt: skip

    def loss(output: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
        found.append({name: value.detach().float().cpu() for name, value in output.items()})
        weights = batch["coefficients"][..., 0]
        return (output["log_probs"] * weights).sum() - 0.3 * (output["entropy"] * weights * mask).sum(), {}

    return output, loss


def run(trial: Trial, batch: dict[str, torch.Tensor], enabled: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Return log-probs, entropy and gradients, and the number of elements of the output layer's largest output."""
    switch(enabled)
    found: list[dict[str, torch.Tensor]] = []
    returned = [0]
    layer = getattr(actor_model(trial), "output_layer", None)
    if layer is not None:
        upstream = type(layer).forward

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = upstream(self, *args, **kwargs)
            if self is layer:
                returned[0] = max(returned[0], output[0].numel())
            return output

        type(layer).forward = counted
    trial.model.zero_grad_buffer()
    sequences = len(batch["input_ids"])
    try:
        get_forward_backward_func()(
            forward_step_func=partial(
                forward_step, hf_config=trial.hf_config, sequence_parallel=trial.config.sequence_parallel, found=found
            ),
            data_iterator=iter([{name: value[row : row + 2] for name, value in batch.items()}
                                for row in range(0, sequences, 2)]),
            model=trial.model, num_microbatches=sequences // 2, seq_length=1, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
    finally:
        if layer is not None:
            type(layer).forward = upstream
    values = {name: torch.cat([each[name] for each in found]) for name in (found[0] if found else ())}
    gradients = {name: parameter.main_grad.cpu().clone() for name, parameter in trial.module.named_parameters()}
    return values | gradients, returned[0]


def actor_model(trial: Trial) -> Any:
    """Return Megatron's model without its wrappers."""
    from verl.utils.megatron_utils import unwrap_model

    return unwrap_model(trial.model)


def compare(checkpoint: Path, layout: Layout, dtype: torch.dtype, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return every result's relative distance by name, and the output layer's size without and with the feature."""
    start_layout(layout)
    switch(enabled=False)
    trial = Trial(checkpoint, layout, dtype=dtype)
    data_parallel = parallel_state.get_data_parallel_world_size()
    mine = {name: value.chunk(data_parallel)[parallel_state.get_data_parallel_rank()] for name, value in batch.items()}
    whole, logits = run(trial, mine, enabled=False)
    deferred, left = run(trial, mine, enabled=True)
    assert whole.keys() == deferred.keys()
    distances = {
        name: ((deferred[name] - value).norm() / value.norm().clamp(min=1e-12)).item() for name, value in whole.items()
    }
    sizes = {name: value.abs().max().item() for name, value in whole.items()}
    return {"distances": distances, "sizes": sizes, "returned": [logits, left]}


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    settings.activate(settings.OverlaySettings())
    batch = torch.load(folder / "reference.pt", weights_only=True)["batch"]
    results = {
        layout.name: compare(folder / model, layout, dtype, batch)
        for model, layouts in LAYOUTS.items()
        for layout, dtype in layouts
    }
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
