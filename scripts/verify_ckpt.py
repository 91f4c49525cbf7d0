#!/usr/bin/env python3
"""Compare two checkpoints bit for bit: HuggingFace FP8, HuggingFace BF16, Megatron shards, in any pair.

FP8 weights are compared by their bfloat16 values. Two training checkpoints are compared by everything that they hold,
those of the stack 2026 by their weights; a training checkpoint and a HuggingFace folder by the float32 weights, rounded
to the folder's types. More in docs/weights.md.

Example:
    python scripts/verify_ckpt.py DeepSeek-V3 SHARDS

Exit codes: 0 equal; 1 different, the first difference is printed; 2 a checkpoint is damaged or unreadable; 130 Ctrl-C.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    # No tensor of these tools touches a device, so torch need not load one.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from post_training.checkpoint.command_line import INTERRUPTED, add_workers_option  # noqa: E402
from post_training.checkpoint.layout_options import add_layout_options, layout_form  # noqa: E402
from post_training.checkpoint.shard_conversion import Comparison, compare_checkpoints  # noqa: E402
from post_training.checkpoint.trained_weights import is_training_checkpoint  # noqa: E402
from post_training.checkpoint.training_comparison import compare_trained  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.interrupts import acknowledged  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "left",
        type=Path,
        metavar="LEFT",
        help="a HuggingFace folder, a folder of Megatron shards, or the folder of a step of a training",
    )
    parser.add_argument("right", type=Path, metavar="RIGHT", help="another one")
    parser.add_argument(
        "--hf-dir",
        type=Path,
        metavar="DIR",
        help="folder with config.json, for shards that other tools wrote",
    )
    add_layout_options(parser, "source")
    add_workers_option(parser)
    return parser.parse_args(arguments)


def _comparison(options: argparse.Namespace) -> Comparison:
    paths = (options.left, options.right)
    if any(map(is_training_checkpoint, paths)):
        return compare_trained(paths, options.hf_dir, options.workers)
    return compare_checkpoints(
        paths, lambda shape: layout_form(options, "source", shape), options.hf_dir, options.workers
    )


def main(arguments: list[str] | None = None) -> int:
    """Compare the checkpoints and return the exit status."""
    options = parse_arguments(arguments)
    try:
        with acknowledged("interrupted; stopping the workers"):
            comparison = _comparison(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    if comparison.only_in_one:
        print(f"not compared, only in one of the two: {len(comparison.only_in_one)} tensors of multi-token prediction")
    if comparison.difference:
        print(f"different: {comparison.difference}")
        return 1
    print(f"equal: {comparison.tensors} tensors, {comparison.bytes} bytes compared")
    return 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
