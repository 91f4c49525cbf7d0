#!/usr/bin/env python3
"""Measure the device memory of a training step on four emulated dies by phase, and the traffic to and from the host.

  ours       weights by plan, and in each phase only what it needs
  published  weights by the published per-tensor algorithm, and in each phase
             only what it needs, as its authors do
  upstream   every tensor gathered whole on every die by verl 0.4.0, and
             everything on the device all the time

All run in the same processes with verl's worker on a small DeepSeek-V3 (float32), from the same weights: `tiny` is the
rehearsal's, `experts` has routed experts so wide that nearly all bytes are theirs. With --cycles, only ours runs, that
many steps, each with a bit for bit comparison of training and rollout weights and their addresses. --addresses is the
key actor_rollout_ref.overlay.residency.rollout_addresses.

With --vocabulary one output layer of DeepSeek-V3's vocabulary is measured instead, on TP4: the peak of forward and
backward above what was there before, and the differences of log-probs, entropy and gradients from float64. Beside ours:
upstream's (verl's functions on Megatron's cross entropy), the same with MindSpeed's replacement, and the published
recipe's replacements, which work in the memory and the dtype of the model's logits (benchmarks/vocabulary_ranks.py).

Examples:
    python benchmarks/step_memory.py --model experts
    python benchmarks/step_memory.py --cycles 20
    python benchmarks/step_memory.py --vocabulary --tokens 4096
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from transformers import AutoConfig, DeepseekV3ForCausalLM  # noqa: E402

from benchmarks.options import make_parser, write_results  # noqa: E402
from benchmarks.published_step import move_as_published, move_by_plan  # noqa: E402
from post_training.arguments import whole  # noqa: E402
from post_training.report.metrics import ALLOCATED_BYTES_PREFIX, PEAK_BYTES_PREFIX, PHASES  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.worker_processes import jobs  # noqa: E402
from tests.worker_processes.conftest import PROMPTS, overrides, random_checkpoint  # noqa: E402
from tests.worker_processes.processes import Processes  # noqa: E402
from verl_patches.features.residency.feature import Addresses  # noqa: E402

WAYS = ("ours", "published", "upstream")
EXPERTS_WIDTH = 512
VOCABULARY, VOCABULARY_RANKS = 129_280, 4
COMPARED_TOKENS, COMPARED_WIDTH = 256, 64
COPIES = ("residency/device_to_host_bytes", "residency/host_to_device_bytes")


def step(processes: Processes, seed: int) -> dict[str, float]:
    """Run one whole step; its metrics are already the largest over dies."""
    processes.run(jobs.rollout, PROMPTS)
    processes.run(jobs.old_log_prob)
    processes.run(jobs.reference_log_prob)
    return processes.run(jobs.update, seed)[-1]


def make_checkpoint(model: str, folder: Path) -> Path:
    """Write random weights of `model` in float32."""
    made = random_checkpoint(folder)
    if model == "experts":
        config = AutoConfig.from_pretrained(made)
        config.moe_intermediate_size = EXPERTS_WIDTH
        torch.manual_seed(0)
        DeepseekV3ForCausalLM(config).save_pretrained(made)
    return made


@contextmanager
def workers(model: str, addresses: str) -> Iterator[Processes]:
    """Build verl's worker on every die, in its first state. The dies' output goes to standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder, Processes() as processes:
        checkpoint = make_checkpoint(model, Path(folder))
        chosen = f"actor_rollout_ref.overlay.residency.rollout_addresses={addresses}"
        processes.run(jobs.build, [*overrides(checkpoint, checkpoint), chosen])
        os.dup2(kept, 1)
        processes.run(jobs.remember)
        yield processes


def cycle(model: str, addresses: str, count: int) -> dict[str, float]:
    """Run `count` steps and compare them.

    Returns:
        Bytes that stayed allocated from the second step to the last, weights that ever differed, and rollout weights
        that a die found at another address, while they were served or in the next step.
    """
    with workers(model, addresses) as processes:
        processes.run(jobs.switch, measure={"verify_weights": True})
        processes.run(jobs.watch_rollout_addresses)
        steps = [step(processes, number) for number in range(count)]
        moved = processes.run(jobs.rollout_addresses_moved)
    name = ALLOCATED_BYTES_PREFIX + "update"
    return {
        "steps": count,
        "bytes_leaked": steps[-1][name] - steps[1][name],
        "weights_differing": sum(metrics["reshard/weights_differing"] for metrics in steps),
        "addresses_watched": sum(die["watched"] for die in moved),
        "addresses_changed_while_served": sum(die["within"] for die in moved),
        "addresses_changed_between_steps": sum(die["across"] for die in moved),
    }


def measure(model: str, addresses: str) -> dict[str, dict[str, float]]:
    """Return the metrics of each way's second step; the first one makes plans and optimizer state.

    Raises:
        RuntimeError: a way gives the rollout other weights than those of training.
    """
    with workers(model, addresses) as processes:
        found = {}
        for name in WAYS:
            processes.run(jobs.recall)
            ours = name != "upstream"
            processes.run(jobs.switch, reshard={"enabled": ours}, residency={"enabled": ours})
            if name == "published":
                processes.run(move_as_published)
            processes.run(jobs.switch, measure={"verify_weights": True})
            if step(processes, 0)["reshard/weights_differing"]:
                raise RuntimeError(f"the way {name!r} sends weights to the rollout that differ from training's")
            processes.run(jobs.switch, measure={"verify_weights": False})
            found[name] = step(processes, 1)
            if name == "published":
                processes.run(move_by_plan)
        return found


def table(found: dict[str, dict[str, float]]) -> str:
    """Return one line per phase: peak and end of each way in MB, and ours against the peaks of the others."""
    others = WAYS[1:]
    rows = [
        ["MB a die", *(f"{name}, {what}" for name in WAYS for what in ("peak", "end")), *(f"/ {o}" for o in others)]
    ]
    for phase in PHASES:
        peak, end = PEAK_BYTES_PREFIX + phase, ALLOCATED_BYTES_PREFIX + phase
        if all(peak in way for way in found.values()):
            cells = [f"{found[way][name] / 1e6:.2f}" for way in WAYS for name in (peak, end)]
            rows.append([phase, *cells, *(f"{found['ours'][peak] / found[other][peak]:.3f}" for other in others)])
    peaks = {way: max(v for name, v in found[way].items() if name.startswith(PEAK_BYTES_PREFIX)) for way in WAYS}
    ratios = [f"{peaks['ours'] / peaks[other]:.3f}" for other in others]
    rows.append(["whole step", *(cell for way in WAYS for cell in (f"{peaks[way] / 1e6:.2f}", "")), *ratios])
    for name in COPIES:
        copied = [cell for way in WAYS for cell in (f"{found[way].get(name, 0) / 1e6:.2f}", "")]
        rows.append([name.removeprefix("residency/").removesuffix("_bytes"), *copied, *[""] * len(others)])
    return aligned(rows)


def aligned(rows: list[list[str]]) -> str:
    """Return the rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def measure_vocabulary(tokens: int, hidden: int) -> dict[str, dict[str, float]]:
    """Measure each way's peak, seconds and distances from float64, the largest over ranks.

    The distances are measured on fewer tokens of a narrower layer, with an entropy bonus.
    """
    layer = {"tokens": tokens, "hidden": hidden, "vocabulary": VOCABULARY, "tp": VOCABULARY_RANKS}
    narrow = layer | {"tokens": COMPARED_TOKENS, "hidden": COMPARED_WIDTH, "entropy": True, "against_float64": True}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "request.json").write_text(json.dumps([layer | {"runs": 2}, narrow]))
        run_ranks("benchmarks.vocabulary_ranks", VOCABULARY_RANKS, Path(folder))
        ranks = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("rank*.json"))]
    found: dict[str, dict[str, float]] = {}
    for way in ranks[0][0]:
        costs = {name: max(rank[0][way][name] for rank in ranks) for name in ("peak", "seconds_forward", "seconds")}
        names = ranks[0][1][way]["from_float64"]
        found[way] = costs | {name: max(rank[1][way]["from_float64"][name] for rank in ranks) for name in names}
    return found


def vocabulary_table(found: dict[str, dict[str, float]]) -> str:
    """Return one line per way: its peak in MB and against upstream's, seconds, and distances from float64."""
    distances = ("log_probs", "entropy", "hidden", "weight")
    rows = [["way", "peak MB", "/ upstream", "forward s", "both s", *(f"{name} off" for name in distances)]]
    for way, results in found.items():
        peak, seconds = results["peak"], (results["seconds_forward"], results["seconds"])
        ratio = peak / found["upstream"]["peak"]
        cells = [f"{peak / 1e6:.1f}", f"{ratio:.3f}", *(f"{each:.2f}" for each in seconds)]
        rows.append([way, *cells, *(f"{results[name]:.1e}" for name in distances)])
    return aligned(rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--cycles", type=whole(0), default=0, help="check for leaks and wrong weights over this many steps"
    )
    parser.add_argument("--model", choices=("tiny", "experts"), default="tiny")
    parser.add_argument("--addresses", choices=get_args(Addresses), default="reserved")
    parser.add_argument("--vocabulary", action="store_true", help="measure an output layer instead of a step")
    parser.add_argument("--tokens", type=whole(4), default=4096, help="of --vocabulary, a multiple of 4")
    parser.add_argument("--hidden", type=whole(4), default=64, help="width of the hidden states of --vocabulary")
    options = parser.parse_args(arguments)
    if options.vocabulary:
        layer = measure_vocabulary(options.tokens // VOCABULARY_RANKS * VOCABULARY_RANKS, options.hidden)
        print(vocabulary_table(layer))
        write_results(options.json, layer)
    elif options.cycles:
        checked = cycle(options.model, options.addresses, options.cycles)
        print(json.dumps(checked))
        write_results(options.json, checked)
    else:
        measured = measure(options.model, options.addresses)
        print(table(measured))
        write_results(options.json, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
