#!/usr/bin/env python3
"""Move weights from Megatron to the rollout in verl 0.9.1's ways and by alltoallv on emulated dies, side by side.

  colocated  each die trains and serves. naive: verl's own way, in which
             mbridge gathers every tensor on every rank and verl's buckets
             carry it whole to the vLLM worker. alltoallv: each worker gets
             what it serves.
  separate   half of the dies train. hccl: verl's checkpoint engine for NPUs,
             in which all training ranks gather and the first one
             broadcasts. alltoallv: each training rank sends what it holds.

verl's engine, checkpoint engines, senders and receivers are the real ones. In the place of vLLM's worker stands a
process with live weights in its layout: of a whole tensor it copies the part that vLLM's loaders take. After each way
every weight must be transformers', bit for bit. A ratio is the median over the repeats of each repeat's own ratio.
Last comes what one die receives for DeepSeek-V3 on 256 dies, computed from the layouts. For the stack 2026.

Example:
    python benchmarks/verl_weights.py --model experts --repeats 3
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.options import make_parser, write_results  # noqa: E402
from post_training.arguments import whole  # noqa: E402
from post_training.plan.placement_text import parse_model, parse_placements  # noqa: E402
from post_training.reshard.statistics import plan_statistics  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.verl_weights_ranks import Request

MEGABYTE = 1e6
KINDS = ("colocated", "separate")
# Per update: the slowest process, the sum of all, the fullest die, the busiest process, the sum of all, the sum of all.
COLUMNS = {
    "wall_seconds": ("wall, s", 1.0, ".3f"),
    "cpu_seconds": ("CPU of all processes, s", 1.0, ".2f"),
    "peak_bytes": ("peak of a die above the weights, MB", MEGABYTE, ".1f"),
    "collectives": ("collectives a process", 1.0, ".0f"),
    "bytes_handed_over": ("handed to collectives, MB", MEGABYTE, ".1f"),
    "bytes_copied": ("copied on the dies, MB", MEGABYTE, ".1f"),
}
WIDTHS = {"tiny": (64, 32, 16), "experts": (512, 512, 64)}
PUBLISHED = ("deepseek-v3", "tp4,pp8,ep8,tp_extend,layers=7/7/8/8/8/8/8/7", "tp2,ep256")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=WIDTHS, default="experts", help="default: %(default)s")
    parser.add_argument("--dies", type=int, choices=(2, 4, 8), default=8, help="emulated dies (default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: both")
    parser.add_argument("--repeats", type=whole(1), default=3, help="how often each way runs (default: %(default)s)")
    parser.add_argument("--bucket", type=whole(1), default=16, metavar="N", help="of both ways, in MiB (default: 16)")
    return parser.parse_args(arguments)


def request_for(kind: str, dies: int, repeats: int, bucket: int) -> Request:
    """Return a request with experts over all ranks of a stage, and layers over two stages if eight dies train.

    mbridge 0.15.1 cannot load Megatron-core's own experts if attention is split over ranks and they are not.
    """
    from benchmarks.verl_weights_ranks import Request

    trainers = dies if kind == "colocated" else dies // 2
    pipeline = 2 if trainers >= 8 else 1
    return Request(dies, kind == "separate", repeats, bucket, 1, pipeline, experts=trainers // pipeline)


def write_checkpoint(model: str, folder: Path) -> int:
    """Write a Qwen3-MoE whose bytes are mostly experts; returns its bytes in bfloat16."""
    import safetensors
    from transformers import Qwen3MoeConfig

    from tests.stack_2026.vllm_ascend.models import MODELS
    from tests.vllm_cases import write_random_model

    hidden, width, experts = WIDTHS[model]
    values = MODELS["qwen3moe"]().to_dict() | {"hidden_size": hidden, "moe_intermediate_size": width}
    write_random_model(Qwen3MoeConfig(**values | {"num_experts": experts, "num_local_experts": experts}), folder)
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  (it is no mapping)
    return 2 * sum(map(prod, sizes))


def measure(request: Request, folder: Path) -> dict[str, Any]:
    """Run one kind. Raises AssertionError with the processes' output when one fails, or a weight differs."""
    from tests.ranks import run_ranks

    os.environ |= {"NPU_EMULATOR_DEVICES": str(request.dies), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    (folder / "request.json").write_text(json.dumps(asdict(request)))
    run_ranks("benchmarks.verl_weights_ranks", request.processes, folder, timeout=2000)
    processes = [json.loads((folder / f"{number}.json").read_text()) for number in range(request.processes)]
    different = {way: names for found in processes for way, names in found["differing"].items() if names}
    assert not different, f"weights differ from transformers': {different}"
    ways = {way: costs([found["ways"][way] for found in processes], request) for way in request.ways}
    theirs, ours = request.ways
    ratios = {name: ratio(ways[ours][name], ways[theirs][name]) for name in COLUMNS}
    return {"request": asdict(request), "ways": ways, "ratios": ratios}


def costs(processes: list[list[dict[str, float]]], request: Request) -> dict[str, list[float]]:
    """Return the cost of each repeat over all processes of a way."""
    found: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for repeat in zip(*processes, strict=True):
        values = {name: [process[name] for process in repeat] for name in COLUMNS}
        peaks = values["peak_bytes"]
        if not request.separate:  # the two processes of a die
            peaks = [
                training + serving
                for training, serving in zip(peaks[: request.dies], peaks[request.dies :], strict=True)
            ]
        found["wall_seconds"].append(max(values["wall_seconds"]))
        found["peak_bytes"].append(max(peaks))
        found["collectives"].append(max(values["collectives"]))
        for name in ("cpu_seconds", "bytes_handed_over", "bytes_copied"):
            found[name].append(sum(values[name]))
    return found


def ratio(ours: list[float], theirs: list[float]) -> float | None:
    """Return the median of the repeats' own ratios; None if the other way needs nothing."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True)) if all(theirs) else None


def published() -> dict[str, float]:
    """Return the mean bytes that one of 256 dies receives for DeepSeek-V3: by plan, and when gathering all tensors."""
    table = parse_model(PUBLISHED[0])
    train, rollout = parse_placements(PUBLISHED[1], PUBLISHED[2], table.layers)
    statistics, _ = plan_statistics(table, train, rollout, bucket_bytes=1 << 30)
    shards = [shard for rank in range(train.world_size) for shard in table.megatron(train, rank) if shard.hf_name]
    whole_model = 2.0 * sum(prod(shape) for shape in table.shapes.values())
    held = 2.0 * sum(prod(shard.extents) for shard in shards) / train.world_size
    planned = statistics.received.average
    return {"alltoallv": planned, "gathered": whole_model - held, "ratio": planned / (whole_model - held)}


def table(kind: str, model_bytes: int, found: dict[str, Any]) -> str:
    """Return one line per quantity."""
    theirs, ours = found["ways"]
    rows = [[f"{kind}, {found['request']['dies']} dies, {model_bytes / MEGABYTE:.1f} MB", theirs, ours, "ratio"]]
    for name, (title, unit, form) in COLUMNS.items():
        cells = [format(median(way[name]) / unit, form) for way in found["ways"].values()]
        value = found["ratios"][name]
        rows.append([title, *cells, "-" if value is None else f"{value:.3f}"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure; return the exit status."""
    options = parse_arguments(arguments)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_bytes = write_checkpoint(options.model, folder)
        for kind in options.kind or KINDS:
            results[kind] = measure(request_for(kind, options.dies, options.repeats, options.bucket), folder)
            print(table(kind, model_bytes, results[kind]), end="\n\n", flush=True)
    results["published"] = computed = published()
    print(
        f"DeepSeek-V3 on 256 dies, computed: a die receives {computed['alltoallv'] / 1e9:.1f} GB by alltoallv and "
        f"{computed['gathered'] / 1e9:.1f} GB when it gathers every tensor, ratio {computed['ratio']:.4f}"
    )
    write_results(options.json, {"model": options.model, "model_bytes": model_bytes} | results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
