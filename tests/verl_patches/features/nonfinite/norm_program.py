"""Two ranks step Megatron's distributed optimizer and those of verl's FSDP actor and critic with finite gradients
whose norm overflows; test_norm.py checks the results.

Every rank writes ``rank<n>.json``.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import hashlib
import itertools
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.critic.dp_critic import DataParallelPPOCritic

from post_training.finite_steps.guard import any_nonfinite
from post_training.live_tensors import gradient_tensors, optimizer_tensors, parameter_tensors
from verl_patches.features import settings
from verl_patches.features.measure.step_record import current_record
from verl_patches.features.nonfinite.updates import guarded

LARGE = 1e19
"""A finite value; the norm of a few of these is finite too, but its square is not."""


class Trained:
    """A model of two layers, the second of which may be an expert, held as verl's actor or critic holds it."""

    def __init__(self, role: str, with_expert: bool, clip: float):
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).npu()
        for parameter in module[1].parameters():
            parameter.allreduce = not with_expert  # Megatron's mark of an expert's weight
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        chunk = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), module)
        adam = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=clip, use_distributed_optimizer=True)
        self.role, self.chunks, self.optimizer = role, [chunk], get_megatron_optimizer(adam, [chunk])
        names = {f"{role}_module": self.chunks, f"{role}_optimizer": self.optimizer}
        self.held = SimpleNamespace(**names)

    def fill(self, value: float) -> None:
        """Fill this rank's reduced gradients with `value`."""
        for gradient in gradient_tensors(self.chunks):
            gradient.fill_(value)

    def step(self) -> dict[str, Any]:
        """Run a guarded update as verl's actor or critic does. Return whether the norm is finite, and the counts."""
        current_record().counts.clear()
        optimizer = f"{self.role}_optimizer"
        metrics = guarded(self.held, self.role, lambda: {"norm": getattr(self.held, optimizer).step()[1]})
        return {"finite_norm": math.isfinite(metrics["norm"]), "counts": dict(current_record().counts)}

    def bits(self) -> str:
        """Return a digest of the weights, main weights and optimizer state, including the step count."""
        total = hashlib.sha256()
        for tensor in (*parameter_tensors(self.chunks), *optimizer_tensors(self.optimizer)):
            total.update(tensor.detach().cpu().numpy().tobytes())
        return total.hexdigest()


def tried(role: str, with_expert: bool, clip: float) -> dict[str, Any]:
    """Run an ordinary update, one that overflows, an ordinary one, and one that overflows without the guard."""
    trained = Trained(role, with_expert, clip)
    trained.fill(0.1)
    parts = getattr(trained.optimizer, "chained_optimizers", [trained.optimizer])
    found: dict[str, Any] = {"first": trained.step(), "parts": len(parts)}
    before = trained.bits()
    trained.fill(LARGE if dist.get_rank() == 1 else 0.1)
    found["elements_finite"] = not any_nonfinite(gradient_tensors(trained.chunks))
    found |= {"overflowing": trained.step(), "unchanged": trained.bits() == before}
    trained.fill(0.1)
    found |= {"after": trained.step(), "learns": trained.bits() != before}
    before = trained.bits()
    trained.fill(LARGE)
    trained.optimizer.step()
    return found | {"unguarded_changes": trained.bits() != before}


def tried_on_fsdp(role: str, upstream: type) -> dict[str, Any]:
    """Run an overflowing update and an ordinary one by verl's patched clip-and-step method, on an unwrapped model."""
    module = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    held = {f"{role}_module": module, f"{role}_optimizer": optimizer}
    worker, found = SimpleNamespace(config=SimpleNamespace(grad_clip=1.0), **held), {}
    for name, value in (("overflowing", LARGE), ("after", 0.1)):
        current_record().counts.clear()
        before = module.weight.detach().clone()
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, value)
        norm = upstream._optimizer_step(worker)
        found[name] = {"finite_norm": math.isfinite(norm), "counts": dict(current_record().counts)}
        found[f"{name}_unchanged"] = torch.equal(module.weight, before)
    return found


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    parallel_state.initialize_model_parallel()
    settings.activate(settings.OverlaySettings())
    found = {
        f"{role} {'experts' if with_expert else 'dense'} {clip}": tried(role, with_expert, clip)
        for role, with_expert, clip in itertools.product(("actor", "critic"), (False, True), (1.0, 0.0))
    }
    fully_sharded = {"actor": DataParallelPPOActor, "critic": DataParallelPPOCritic}
    found |= {f"{role} FSDP": tried_on_fsdp(role, upstream) for role, upstream in fully_sharded.items()}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
