"""Ranks that compare verl's FSDP actor and critic with one plain pass; test_fsdp_gradients.py checks the results."""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.workers.fsdp_workers  # noqa: F401
from omegaconf import OmegaConf
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from verl import DataProto
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.critic.dp_critic import DataParallelPPOCritic

from post_training.hang_detection.settings import WatchSettings
from post_training.hang_detection.signs import process_signs
from tests.verl_patches.features.exact_loss import value_pass
from tests.verl_patches.features.exact_loss.whole_pass import CLIP, ENTROPY, KL, SEQUENCES
from verl_patches.features import settings
from verl_patches.features.exact_loss.feature import ExactLossSettings
from verl_patches.features.overlong.filtering import without_truncated

CONFIGURATION = {
    "clip_ratio": CLIP, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0, "entropy_coeff": ENTROPY,
    "use_kl_loss": True, "kl_loss_coef": KL, "kl_loss_type": "low_var_kl", "ppo_epochs": 1, "use_dynamic_bsz": False,
    "loss_agg_mode": "token-mean", "ppo_mini_batch_size": SEQUENCES, "ppo_micro_batch_size_per_gpu": 1,
    "ppo_max_token_len_per_gpu": 1, "ulysses_sequence_parallel_size": 1, "use_torch_compile": False,
    # High enough not to change any gradient.
    "grad_clip": 1e9,
}  # fmt: skip

CRITIC = {
    "cliprange_value": value_pass.CLIP, "model": {"use_remove_padding": False},
    **{name: CONFIGURATION[name] for name in (
        "ppo_epochs", "use_dynamic_bsz", "loss_agg_mode", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu",
        "ppo_max_token_len_per_gpu", "ulysses_sequence_parallel_size", "grad_clip",
    )},
}  # fmt: skip


class Recorder:
    """A stand-in for the optimizer: records the whole gradients of every update and changes no weight."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.gradients: list[dict[str, torch.Tensor]] = []

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def step(self) -> None:
        with FullyShardedDataParallel.summon_full_params(self._model, with_grads=True):
            found = {name: parameter.grad.clone().cpu() for name, parameter in self._model.named_parameters()}
        self.gradients.append({name.replace("_fsdp_wrapped_module.", ""): value for name, value in found.items()})


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    return FullyShardedDataParallel(model.float().npu(), use_orig_params=True, device_id=torch.npu.current_device())


class Updates:
    """Updates by verl's actor on a sharded model, compared with the gradients of the plain passes."""

    loss = "actor/pg_loss"

    def __init__(self, folder: Path):
        self._reference = torch.load(folder / "reference.pt", weights_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", attn_implementation="eager")
        self._model = sharded(model)
        self._trained = DataParallelPPOActor(OmegaConf.create(CONFIGURATION), self._model, None)

    def update(self, batch: DataProto) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
        """Return the gradients of every update of the batch, and verl's metrics."""
        self._trained.actor_optimizer = recorder = Recorder(self._model)
        metrics = self._trained.update_policy(batch)
        return recorder.gradients, metrics

    def run(
        self,
        mode: str,
        micro: int = 1,
        limit: int | None = None,
        exact: bool = True,
        mini: int = SEQUENCES,
        epochs: int = 1,
        high: float | None = None,
        cut_left_out: bool = False,
        against: str | None = None,
    ) -> dict[str, Any]:
        """Update with the whole batch. Return the error of each update's gradients, and the loss that it reports.

        Args:
            micro: sequences of a micro batch.
            limit: the most tokens of a micro batch, used instead of `micro`.
            mini: sequences of an update, over all ranks; with 8 the updates take the first and the second half in turn.
            high: the upper clip.
            cut_left_out: leave answers that fill the response width out of the loss.
            against: the plain pass to compare with, instead of those of the mode.
        """
        settings.activate(replace(settings.current(), exact_loss=ExactLossSettings(exact)))
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self._trained.config.update(
            loss_agg_mode=mode, ppo_mini_batch_size=mini // ranks, ppo_micro_batch_size_per_gpu=micro,
            ppo_epochs=epochs, use_dynamic_bsz=limit is not None, ppo_max_token_len_per_gpu=limit or 1,
            clip_ratio_high=high,
        )  # fmt: skip
        rows = torch.cat([part.chunk(ranks)[rank] for part in torch.arange(SEQUENCES).split(mini)])
        columns = {name: value[rows] for name, value in self._reference["batch"].items()}
        batch = DataProto.from_dict(columns, meta_info={"temperature": 1.0})
        batch = without_truncated(batch, frozenset()) if cut_left_out else batch
        moves = process_signs()._moves
        gradients, metrics = self.update(batch.to("npu"))
        moves, micro_batches = process_signs()._moves - moves, mini // ranks // micro
        parts = ["all"] if mini == SEQUENCES else ["first", "second"] * epochs
        passes = [against] if against else [f"{mode}/{part}" for part in parts]
        assert len(gradients) == len(passes)
        return {
            "errors": [self._error(found, name) for found, name in zip(gradients, passes, strict=True)],
            "losses": metrics[self.loss],
            "expected_losses": [self._reference["passes"][name]["losses"][0] for name in passes],
            # One forward and one backward of each micro batch.
            "progress": None if limit else [moves, len(parts) * 2 * micro_batches],
        }

    def _error(self, gradients: dict[str, torch.Tensor], name: str) -> float:
        expected = self._reference["passes"][name]["gradients"]
        assert gradients.keys() == expected.keys()
        difference = sum(
            (gradients[weight].double() - value.double()).square().sum() for weight, value in expected.items()
        )
        return (difference / sum(value.double().square().sum() for value in expected.values())).sqrt().item()


class ValueUpdates(Updates):
    """The same for verl's critic."""

    loss = "critic/vf_loss"

    def __init__(self, folder: Path):
        self._reference = torch.load(folder / "critic.pt", weights_only=True)
        model = AutoModelForTokenClassification.from_pretrained(folder / "critic", attn_implementation="eager")
        self._model = sharded(model)
        self._trained = DataParallelPPOCritic(OmegaConf.create(CRITIC), self._model, None)

    def update(self, batch: DataProto) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
        self._trained.critic_optimizer = recorder = Recorder(self._model)
        metrics = self._trained.update_critic(batch)
        return recorder.gradients, metrics

    def values(self, limit: int | None) -> dict[str, float]:
        """Return the largest difference of this rank's values from the plain pass's, and from these moved by a row."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        columns = {name: each.chunk(ranks)[rank].npu() for name, each in self._reference["batch"].items()}
        asked = {"micro_batch_size": 2, "use_dynamic_bsz": limit is not None, "max_token_len": limit}
        found = self._trained.compute_values(DataProto.from_dict(columns, meta_info=asked)).cpu()
        assert found.dtype == torch.float32
        expected = self._reference["values"].chunk(ranks)[rank]
        return {
            "difference": (found - expected).abs().max().item(),
            "disordered": (found - expected.roll(1, dims=0)).abs().max().item(),
        }


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    settings.activate(replace(settings.current(), precision="float32", watch=WatchSettings()))
    plan = json.loads((folder / "plan.json").read_text())
    updates, values = Updates(folder), ValueUpdates(folder)
    results = {name: updates.run(**options) for name, options in plan["actor"].items()}
    results |= {f"critic: {name}": values.run(**options) for name, options in plan["critic"].items()}
    results |= {f"values at most {limit}": values.values(limit) for limit in plan["limits"]}
    (folder / f"rank{dist.get_rank()}of{dist.get_world_size()}.json").write_text(json.dumps(results))
    dist.barrier()
