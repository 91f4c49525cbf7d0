"""Ranks that compare verl's Megatron actor and critic with one plain pass; test_gradients.py checks the results.

The processes go through every layout that has their number of ranks.
"""

# Its first import is the prelude.
from tests.post_training.models.megatron.training_models_program import Layout, Trial, start_layout, training_shards

# isort: split
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from omegaconf import OmegaConf
from verl import DataProto
from verl.workers.actor.megatron_actor import MegatronPPOActor
from verl.workers.critic.megatron_critic import MegatronPPOCritic

from post_training.checkpoint.loading import load_from_huggingface
from post_training.hang_detection.settings import WatchSettings
from post_training.hang_detection.signs import process_signs
from post_training.layouts.model_tensors import train_tensors
from post_training.layouts.placements import train_placement
from post_training.layouts.value_model import value_table
from post_training.models.families import table_for
from tests.verl_patches.features.exact_loss import value_pass
from tests.verl_patches.features.exact_loss.whole_pass import CLIP, ENTROPY, KL, SEQUENCES
from verl_patches.features import settings
from verl_patches.features.dynamic_batches import micro_batches
from verl_patches.features.exact_loss.feature import ExactLossSettings
from verl_patches.features.overlong.filtering import without_truncated

LAYOUTS = [
    Layout("data1"),
    Layout("data2"),
    Layout("tensor2", tensor=2),
    Layout("pipeline2", pipeline=2),
    Layout("tensor2_pipeline2", tensor=2, pipeline=2),
    Layout("tensor2_data2", tensor=2),
    Layout("pipeline2_data2", pipeline=2),
    Layout("tensor2_pipeline2_data2", tensor=2, pipeline=2),
]
RANKS = {"data1": 1, "data2": 2, "tensor2": 2, "pipeline2": 2, "tensor2_pipeline2": 4, "tensor2_data2": 4,
         "pipeline2_data2": 4, "tensor2_pipeline2_data2": 8}  # fmt: skip
CONFIGURATION = {
    "clip_ratio": CLIP, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0, "entropy_coeff": ENTROPY,
    "use_kl_loss": True, "kl_loss_coef": KL, "kl_loss_type": "low_var_kl", "ppo_epochs": 1, "shuffle": False,
    "data_loader_seed": 1, "use_dynamic_bsz": False, "loss_agg_mode": "token-mean", "ppo_mini_batch_size": SEQUENCES,
    "ppo_micro_batch_size_per_gpu": 1, "ppo_max_token_len_per_gpu": 1,
    "megatron": {"tensor_model_parallel_size": 1, "sequence_parallel": False, "context_parallel_size": 1},
    "profile": {"use_profile": False, "profile_ranks": None, "step_start": -1, "step_end": -1, "save_path": None},
}  # fmt: skip


class Recorder:
    """A stand-in for Megatron's optimizer: records the gradients of every update and changes no weight."""

    param_groups = [{"lr": 0.0}]

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self.gradients: list[dict[str, torch.Tensor]] = []

    def zero_grad(self) -> None:
        pass

    def step(self) -> tuple[bool, float, int]:
        gradients = {name: parameter.main_grad.clone() for name, parameter in self._module.named_parameters()}
        self.gradients.append(gradients)
        return True, 0.0, 0


class Updates:
    """Updates by verl's actor in one layout, compared with the gradients of the plain passes."""

    losses = ("actor/pg_loss", "actor/kl_loss")

    def __init__(self, folder: Path, layout: Layout, reference: dict[str, Any]):
        self._layout, self._reference = layout, reference
        trial = Trial(folder / "checkpoint", layout)
        self._shards = training_shards(trial.hf_config, layout)
        self._module = trial.module
        config = OmegaConf.create(CONFIGURATION)
        config.megatron.tensor_model_parallel_size = layout.tensor
        self._trained = MegatronPPOActor(config, trial.hf_config, trial.hf_config, trial.config, [trial.model], None)

    def update(self, batch: DataProto) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
        """Return the gradients of every update of the batch, and verl's metrics."""
        self._trained.actor_optimizer = recorder = Recorder(self._module)
        metrics = self._trained.update_policy(self._trained.make_minibatch_iterator(batch))
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
        """Update with the whole batch. Return the error of each update's gradients, and the losses that it reports.

        Args:
            micro: sequences of a micro batch.
            limit: the most tokens of a micro batch, used instead of `micro`.
            mini: sequences of an update, over all ranks; with 8 the updates take the first and the second half in turn.
            high: the upper clip.
            cut_left_out: leave answers that fill the response width out of the loss.
            against: the plain pass to compare with, instead of those of the mode.
        """
        data = parallel_state.get_data_parallel_world_size()
        self._choose(limit, exact_loss=ExactLossSettings(exact), loss_agg_mode=mode)
        self._trained.config.update(
            loss_agg_mode=mode, ppo_mini_batch_size=mini // data, ppo_epochs=epochs, ppo_micro_batch_size_per_gpu=micro,
            clip_ratio_high=high,
        )  # fmt: skip
        batch = self._batch(mini, micro)
        if cut_left_out:  # as the driver does
            batch = without_truncated(batch.to("cpu"), frozenset()).to("npu")
        moves = process_signs()._moves
        every, metrics = self.update(batch)
        moves, micro_batches = process_signs()._moves - moves, mini // data // micro
        parts = ["all"] if mini == SEQUENCES else ["first", "second"] * epochs
        passes = [against] if against else [f"{mode}/{part}" for part in parts]
        assert len(every) == len(passes)
        found = zip(every, passes, strict=True)
        return {
            "errors": [self._error(gradients, name) for gradients, name in found],
            "losses": [metrics[name] for name in self.losses if name in metrics],
            "expected_losses": [self._reference["passes"][name]["losses"] for name in passes],
            # One forward and one backward of each micro batch, and the end of each update's schedule.
            "progress": None if limit else [moves, len(parts) * (2 * micro_batches + 1)],
        }

    def log_probs(self, limit: int) -> dict[str, Any]:
        """Compare log-probs and entropies from micro batches of at most `limit` tokens with those of lone sequences."""
        found = {}
        for name, most in {"fixed": None, "dynamic": limit, "disordered": limit}.items():
            self._choose(most)
            batch = self._batch(SEQUENCES, 1)
            batch.meta_info |= {"use_dynamic_bsz": most is not None, "max_token_len": limit}
            patched = mock.patch.object(
                micro_batches, "_in_order", lambda outputs, places: micro_batches._joined(outputs, slice(None))
            )
            with patched if name == "disordered" else nullcontext():
                found[name] = torch.stack(self._trained.compute_log_prob(batch, calculate_entropy=True))
        return {
            name: {"equal": torch.equal(each, found["fixed"]), "difference": (each - found["fixed"]).abs().max().item()}
            for name, each in found.items()
        }

    def _choose(self, limit: int | None, **chosen: Any) -> None:
        tokens = {"dynamic_update": limit is not None, "update_tokens": limit}
        settings.activate(replace(settings.current(), watch=WatchSettings(), **tokens, **chosen))
        self._trained.config.use_dynamic_bsz = limit is not None

    def _batch(self, mini: int, micro: int) -> DataProto:
        """Return this rank's sequences for all updates, in their order."""
        data, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        rows = torch.cat([part.chunk(data)[rank] for part in torch.arange(SEQUENCES).split(mini)])
        columns = {name: value[rows].npu() for name, value in self._reference["batch"].items()}
        return DataProto.from_dict(columns, meta_info={"micro_batch_size": micro})

    def _error(self, gradients: dict[str, torch.Tensor], name: str) -> list[float]:
        """Return the squares of the differences and of the expected values, each summed over this rank's weights."""
        expected = self._reference["passes"][name]["gradients"]
        squares = torch.zeros(2, dtype=torch.float64)
        for shard in self._shards:
            share = expected[shard.hf_name][tuple(slice(*interval) for interval in shard.bounds)].double()
            mine = shard.view.of(gradients[shard.local]).cpu().double()
            squares += torch.stack([(mine - share).square().sum(), share.square().sum()])
        return squares.tolist()


class ValueUpdates(Updates):
    """The same for verl's critic."""

    losses = ("critic/vf_loss",)

    def __init__(self, folder: Path, layout: Layout, reference: dict[str, Any]):
        self._layout, self._reference = layout, reference
        trial = Trial(folder / "checkpoint", layout, value=True)
        self._module = trial.module
        self.begun = {name: tensor.data.cpu().clone() for name, tensor in self._module.named_parameters()}
        table = value_table(table_for(trial.hf_config))
        self._shards = table.megatron(train_placement(trial.config), dist.get_rank())
        load_from_huggingface(folder / "critic", train_tensors([trial.model]), self._shards, table.shapes)
        trial.config.finalize_model_grads_func = None  # as verl leaves it
        config = OmegaConf.create(CONFIGURATION | {"cliprange_value": value_pass.CLIP})
        config.megatron.tensor_model_parallel_size = layout.tensor
        arguments = (config, trial.hf_config, trial.hf_config, trial.config, [trial.model], None, None)
        self._trained = MegatronPPOCritic(*arguments)

    def update(self, batch: DataProto) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
        self._trained.critic_optimizer = recorder = Recorder(self._module)
        metrics = self._trained.update_critic(self._trained.make_minibatch_iterator(batch))
        return recorder.gradients, metrics

    def without_mark(self, **options: Any) -> dict[str, Any]:
        """`run` with a head whose bias lacks the sequence-parallel mark, as in verl."""
        biases = [each for name, each in self._module.named_parameters() if name.endswith("output_layer.bias")]
        marked = [getattr(bias, "sequence_parallel", False) for bias in biases]
        for bias in biases:
            bias.sequence_parallel = False
        try:
            return self.run(**options)
        finally:
            for bias, mark in zip(biases, marked, strict=True):
                bias.sequence_parallel = mark

    def not_added_up(self, **options: Any) -> dict[str, Any]:
        """`run` without the sums over ranks, which verl leaves out."""
        config = get_model_config(self._module)
        finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
        try:
            return self.run(**options)
        finally:
            config.finalize_model_grads_func = finalize

    def values(self, limit: int | None) -> dict[str, float]:
        """Return the largest difference of this rank's values from the plain pass's, and from these moved by a row."""
        self._choose(limit)
        config = self._trained.config
        config.update(ppo_max_token_len_per_gpu=limit or 1, forward_max_token_len_per_gpu=limit or 1)
        batch = self._batch(SEQUENCES, 2)
        batch.meta_info |= {"use_dynamic_bsz": limit is not None, "max_token_len": limit}
        found = self._trained.compute_values(batch).cpu()
        data, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        expected = self._reference["values"].chunk(data)[rank]
        return {
            "difference": (found - expected).abs().max().item(),
            "disordered": (found - expected.roll(1, dims=0)).abs().max().item(),
        }


def measured_critic(folder: Path, layout: Layout, plan: dict[str, Any]) -> dict[str, Any]:
    """Return `Updates.run`'s results by update, the values' differences by limit, and as "head" the initial values of
    this rank's head, which are empty on a stage without one."""
    critic = ValueUpdates(folder, layout, torch.load(folder / "critic.pt", weights_only=True))
    head = [value.flatten().tolist() for name, value in sorted(critic.begun.items()) if "output_layer" in name]
    found: dict[str, Any] = {name: critic.run(**options) for name, options in plan["critic"].items()}
    found["bias without its mark"] = critic.without_mark(mode="token-mean", micro=2)
    found["not added up"] = critic.not_added_up(mode="token-mean", micro=2)
    return found | {f"values {limit}": critic.values(limit) for limit in (None, max(plan["limits"]))} | {"head": head}


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    reference = torch.load(folder / "reference.pt", weights_only=True)
    plan = json.loads((folder / "plan.json").read_text())
    results: dict[str, Any] = {}
    for layout in LAYOUTS:
        if RANKS[layout.name] == dist.get_world_size():
            start_layout(layout)
            updates = Updates(folder, layout, reference)
            results[layout.name] = {name: updates.run(**options) for name, options in plan["updates"].items()}
            results[layout.name] |= {f"log_probs {limit}": updates.log_probs(limit) for limit in plan["limits"]}
            results[layout.name]["critic"] = measured_critic(folder, layout, plan)
    (folder / f"rank{dist.get_rank()}of{dist.get_world_size()}.json").write_text(json.dumps(results))
    dist.barrier()
