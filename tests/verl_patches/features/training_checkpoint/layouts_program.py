"""Ranks that train and save real Megatron models in one layout after another, and load each in all layouts.

Every rank writes its results to ``rank<n>.json``, and every load is saved once more; test_megatron_layouts.py
checks both.
"""

# Its first import is the prelude.
from tests.post_training.models.megatron.training_models_program import Layout, Trial, start_layout

# isort: split
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from post_training.checkpoint.training_rank import MegatronRank
from post_training.layouts.model_tensors import train_tensors
from post_training.layouts.placements import train_placement
from post_training.models.families import table_for
from verl_patches.features.training_checkpoint.restoring import load_training
from verl_patches.features.training_checkpoint.saving import rank_file, save_training

SEQUENCES, LENGTH, STEPS = 8, 6, 2
LAYOUTS = {
    "deepseek_v3": [
        Layout("tensor2_pipeline2_expert2", tensor=2, pipeline=2, expert=2, stages=[2, 1]),
        Layout("pipeline2_expert2", pipeline=2, expert=2, stages=[2, 1]),
        Layout("tensor2_expert4", tensor=2, expert=4),
        Layout("data8"),
    ],
    "qwen3_moe": [
        Layout("tensor2_pipeline2_expert2", tensor=2, pipeline=2, expert=2, stages=[3, 1]),
        Layout("tensor2_expert2", tensor=2, expert=2),
        Layout("pipeline2_expert4", pipeline=2, expert=4, stages=[1, 3]),
    ],
    "qwen2": [
        Layout("tensor2_pipeline2", tensor=2, pipeline=2),
        Layout("tensor2", tensor=2),
        Layout("pipeline2", pipeline=2),
    ],
}


def make_batch(vocabulary: int) -> dict[str, torch.Tensor]:
    """Return whole sequences of random tokens, and a coefficient for every logit."""
    generator = torch.Generator().manual_seed(5)
    shape = (SEQUENCES, LENGTH)
    return {
        "input_ids": torch.randint(3, vocabulary, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.bool),
        "position_ids": torch.arange(LENGTH).repeat(SEQUENCES, 1),
        "coefficients": torch.randn(*shape, vocabulary, generator=generator) / 100,
    }


class Trained:
    """A model in one layout with Megatron's distributed optimizer."""

    def __init__(self, checkpoint: Path, layout: Layout, dtype: torch.dtype = torch.float32):
        start_layout(layout)
        self._trial = Trial(checkpoint, layout, sharded_optimizer=True, dtype=dtype)
        self._batch = make_batch(self._trial.hf_config.vocab_size)
        adam = OptimizerConfig(
            optimizer="adam", lr=1e-3, params_dtype=dtype, bf16=dtype == torch.bfloat16, clip_grad=1.0,
            use_distributed_optimizer=True,
        )  # fmt: skip
        self._optimizer: MegatronOptimizer = get_megatron_optimizer(adam, [self._trial.model])

    def train(self) -> None:
        for _ in range(STEPS):
            self._trial.run(self._batch, backward=True)
            self._optimizer.step()

    def loss(self) -> float:
        """Return the mean negative log-prob of the next tokens over the whole batch."""
        logits = self._trial.run(self._batch, backward=False)
        mine = (0.0, 0)
        if logits is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
            data, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
            tokens = self._batch["input_ids"].chunk(data)[rank][:, 1:]
            scores = logits[:, :-1].double().log_softmax(-1).gather(-1, tokens.unsqueeze(-1))
            mine = (-scores.sum().item(), scores.numel())
        shares: list[tuple[float, int]] = [mine] * dist.get_world_size()
        dist.all_gather_object(shares, mine)
        total, count = map(sum, zip(*shares, strict=True))
        assert count == SEQUENCES * (LENGTH - 1)
        return total / count

    def rank(self) -> MegatronRank:
        placement = train_placement(self._trial.config)
        tensors = train_tensors([self._trial.model])
        return MegatronRank(table_for(self._trial.hf_config), placement, dist.get_rank(), tensors, self._optimizer)

    def save(self, folder: Path) -> None:
        save_training(rank_file(folder, self.rank(), {}, {}))


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    losses: dict[str, float] = {}
    for family, layouts in LAYOUTS.items():
        place = folder / family
        for layout in layouts:
            trained = Trained(place / "checkpoint", layout)
            trained.train()
            losses[f"{family}/{layout.name}"] = trained.loss()
            trained.save(place / "saved" / layout.name)
        for layout in layouts:
            other = Trained(place / "checkpoint", layout)
            for saved in layouts:
                load_training(place / "saved" / saved.name, other.rank())
                pair = f"{family}/{saved.name} in {layout.name}"
                losses[pair] = other.loss()
                other.save(folder / "again" / pair)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.barrier()
