#!/usr/bin/env python3
"""Measure an update on FSDP in micro batches of a number of sequences, and of a number of tokens.

Example:
    python benchmarks/update_batches.py --sequences 64 --fixed 4 --turns 5

  fixed, padded   every sequence as long as the longest may be
  fixed           padding removed
  by tokens       padding removed, and as many sequences as have together the
                  tokens of the largest micro batch of `fixed`

verl's actor updates a small Qwen3 of random weights on one emulated die, which runs on the processor: the seconds show
the computation, and not what a die waits for. The lengths are as GSM8K's, log-normal with 143 +- 59 tokens. The ways
take turns on the same batch, and their loss is the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verl_patches.prelude_patch  # noqa: E402, F401

# isort: split
import math  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from dataclasses import replace as replaced  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import verl.workers.fsdp_workers  # noqa: E402, F401
from omegaconf import OmegaConf  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.workers.actor.dp_actor import DataParallelPPOActor  # noqa: E402

from benchmarks.options import make_parser, write_results  # noqa: E402
from post_training.arguments import whole  # noqa: E402
from post_training.ports import reserve_ports  # noqa: E402
from verl_patches.features import settings  # noqa: E402
from verl_patches.features.exact_loss.feature import ExactLossSettings  # noqa: E402

WAYS = ("fixed, padded", "fixed", "by tokens")
PROMPT, RESPONSE, VOCABULARY = 128, 256, 512
MODEL = Qwen3Config(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, vocab_size=VOCABULARY,
)  # fmt: skip
CONFIGURATION = {
    "clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "entropy_coeff": 0.0, "use_kl_loss": False,
    "ppo_epochs": 1, "loss_agg_mode": "token-mean", "ulysses_sequence_parallel_size": 1, "use_torch_compile": False,
    "grad_clip": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One update: wall and processor seconds, its micro batches, and verl's loss."""

    way: str
    wall_s: float
    processor_s: float
    micro_batches: int
    loss: float


def batch_of(sequences: int, seed: int = 0) -> DataProto:
    """Return the batch that verl gives to an update: prompts padded at the left, answers at the right."""
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [min(max(2, round(math.exp(draw.gauss(4.885, 0.4)))), PROMPT + RESPONSE) for _ in range(sequences)]
    prompts = torch.tensor([min(length // 2, PROMPT) for length in lengths])[:, None]
    answers = (torch.tensor(lengths)[:, None] - prompts).clamp(max=RESPONSE)
    places = torch.arange(PROMPT + RESPONSE)
    mask = ((places >= PROMPT - prompts) & (places < PROMPT + answers)).long()
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=numbers) * mask
    advantages = torch.randn(sequences, 1, generator=numbers).expand(-1, RESPONSE).contiguous()
    columns = {
        "input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:].contiguous(), "advantages": advantages,
        "old_log_probs": torch.full((sequences, RESPONSE), -math.log(VOCABULARY)),
    }  # fmt: skip
    return DataProto.from_dict(columns, meta_info={"temperature": 1.0})


def largest_of(batch: DataProto, fixed: int) -> int:
    """Return the tokens of the largest micro batch of `fixed` sequences."""
    return max(part.sum().item() for part in batch.batch["attention_mask"].split(fixed))


class Updates:
    """verl's actor with constant weights: the learning rate is 0."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM._from_config(MODEL, attn_implementation="flash_attention_2").float().npu()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self._actor = DataParallelPPOActor(OmegaConf.create(CONFIGURATION), model, optimizer)
        self._forward, self._micro_batches = self._actor._forward_micro_batch, 0
        self._actor._forward_micro_batch = self._counted

    def _counted(self, *arguments: object, **named: object) -> object:
        self._micro_batches += 1
        return self._forward(*arguments, **named)

    def take_turn(self, way: str, batch: DataProto, fixed: int) -> Turn:
        """Update with `batch` in one of WAYS."""
        self._actor.use_remove_padding = way != WAYS[0]
        self._actor.config.update(
            ppo_mini_batch_size=len(batch), ppo_micro_batch_size_per_gpu=fixed, use_dynamic_bsz=way == WAYS[2],
            ppo_max_token_len_per_gpu=largest_of(batch, fixed),
        )  # fmt: skip
        self._micro_batches = 0
        wall, processor = time.perf_counter(), time.process_time()
        metrics = self._actor.update_policy(batch)
        torch.npu.synchronize()
        spent = time.perf_counter() - wall, time.process_time() - processor
        return Turn(way, *spent, self._micro_batches, metrics["actor/pg_loss"][0])


def report(turns: list[Turn]) -> None:
    """Print the medians of each way, and the ratios of neighbouring turns to `fixed`."""
    by_way = {way: [turn for turn in turns if turn.way == way] for way in WAYS}
    print(f"{'way':<15}{'wall s':>9}{'processor s':>13}{'micro batches':>15}{'of fixed':>10}")
    for way, found in by_way.items():
        wall, processor = (
            statistics.median(getattr(turn, name) for turn in found) for name in ("wall_s", "processor_s")
        )
        pairs = zip(found, by_way["fixed"], strict=True)
        ratio = statistics.median(turn.processor_s / other.processor_s for turn, other in pairs)
        print(f"{way:<15}{wall:>9.3f}{processor:>13.3f}{found[0].micro_batches:>15}{ratio:>10.2f}")


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sequences", type=whole(1), default=64, help="of an update (default: %(default)s)")
    parser.add_argument("--fixed", type=whole(1), default=4, help="sequences of a micro batch (default: %(default)s)")
    parser.add_argument("--turns", type=whole(1), default=5, help="of each way (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.sequences % options.fixed:
        parser.error(f"--fixed={options.fixed} does not divide --sequences={options.sequences}")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_ports()), "RANK": "0", "WORLD_SIZE": "1"}
    torch.npu.set_device(0)
    dist.init_process_group("hccl")
    try:
        exact = ExactLossSettings(enabled=True)
        settings.activate(replaced(settings.current(), precision="float32", exact_loss=exact))
        updates, batch = Updates(), batch_of(options.sequences)
        for way in WAYS:
            updates.take_turn(way, batch, options.fixed)  # until everything is there
        turns = [updates.take_turn(way, batch, options.fixed) for _ in range(options.turns) for way in WAYS]
    finally:
        dist.destroy_process_group()
    report(turns)
    write_results(options.json, [asdict(turn) for turn in turns])


if __name__ == "__main__":
    main()
