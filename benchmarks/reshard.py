#!/usr/bin/env python3
"""Move training weights into a vLLM-Ascend rollout in three ways on eight emulated dies, and compare what they cost.

  planned    this project's exchange
  verl       verl 0.4.0's own code: whole tensors gathered one by one, and
             vLLM's load_weights
  published  the per-tensor algorithm of the recipe's authors, written from
             its description

The ways run in turn inside one set of processes, into the same live model, and must agree in every byte. A ratio is the
median over the repeats of each repeat's own ratio.

Example:
    python benchmarks/reshard.py --model experts --repeats 5
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.options import make_parser, write_results  # noqa: E402
from post_training.arguments import whole  # noqa: E402
from post_training.plan.placement_text import parse_bytes  # noqa: E402
from rehearsal.tiny_model.architecture import tiny_config  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

DIES = 8
MEGABYTE = 1e6
COLUMNS = {
    "wall_seconds": ("wall, s", 1.0, ".3f"),
    "cpu_seconds": ("CPU of all dies, s", 1.0, ".3f"),
    "peak_bytes": ("peak above the weights, MB", MEGABYTE, ".1f"),
    "collectives": ("collectives a die", 1.0, ".0f"),
    "bytes_handed_over": ("handed to collectives, MB", MEGABYTE, ".1f"),
    "bytes_transposed": ("transposed by copies, MB", MEGABYTE, ".1f"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=("tiny", "experts"), action="append", help="default: both")
    parser.add_argument("--repeats", type=whole(1), default=5, help="how often each way runs (default: 5)")
    parser.add_argument(
        "--bucket",
        type=_bytes,
        default="64MiB",
        metavar="SIZE",
        help="staging of the planned way, each direction (default: 64MiB)",
    )
    return parser.parse_args(arguments)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def write_config(model: str, folder: Path) -> None:
    """Write the config of the rehearsal's tiny model, or of one whose bytes are nearly all routed experts."""
    config = tiny_config(0, 1, 2)
    config.torch_dtype = torch.bfloat16
    if model == "experts":
        config.hidden_size = config.moe_intermediate_size = 512
        config.n_routed_experts, config.num_hidden_layers = 64, 3
    config.save_pretrained(folder)


def measure(model: str, repeats: int, bucket_bytes: int) -> dict:
    """Run the benchmark of one model. Raises AssertionError with the ranks' output when a way fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(model, folder)
        (folder / "request.json").write_text(json.dumps({"repeats": repeats, "bucket_bytes": bucket_bytes}))
        run_ranks("benchmarks.reshard_ranks", DIES, folder, timeout=1500)
        found = json.loads((folder / "measured.json").read_text())
    found["ratios"] = {
        name: {other: ratio(found["ways"], name, other) for other in ("verl", "published")} for name in COLUMNS
    }
    return found


def ratio(ways: dict, quantity: str, other: str) -> float | None:
    """Return the median ratio of the planned way to another, repeat by repeat; None if the other needs nothing."""
    pairs = zip(ways["planned"][quantity], ways[other][quantity], strict=True)
    return median(ours / theirs for ours, theirs in pairs) if all(ways[other][quantity]) else None


def table(model: str, found: dict) -> str:
    """Return one line per quantity."""
    rows = [[f"{model}, {found['model_bytes'] / MEGABYTE:.1f} MB", *found["ways"], "/ verl", "/ published"]]
    for name, (title, unit, form) in COLUMNS.items():
        cells = [format(median(way[name]) / unit, form) for way in found["ways"].values()]
        ratios = ("-" if value is None else f"{value:.3f}" for value in found["ratios"][name].values())
        rows.append([title, *cells, *ratios])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure; return the exit status."""
    options = parse_arguments(arguments)
    found = {model: measure(model, options.repeats, options.bucket) for model in options.model or ("tiny", "experts")}
    print("\n\n".join(table(*item) for item in found.items()))
    write_results(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
