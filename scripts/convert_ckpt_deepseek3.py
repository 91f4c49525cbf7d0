#!/usr/bin/env python3
r"""Convert a DeepSeek-V3 checkpoint (HuggingFace safetensors, BF16 or FP8 as published) to Megatron shards.

The shards are those of MindSpeed-LLM v2.0.0. The model's dimensions are read from config.json. Run the same command
again to resume an interrupted conversion. More in docs/weights.md.

Example:
    python scripts/convert_ckpt_deepseek3.py --load-dir MODEL \
        --save-dir SHARDS --target-tensor-parallel-size 4 \
        --target-pipeline-parallel-size 8 --target-expert-parallel-size 8 \
        --num-layer-list 7,7,8,8,8,8,8,7 \
        --moe-grouped-gemm --moe-tp-extend-ep

Exit codes: 0 done; 2 rejected; 130 Ctrl-C.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    # No tensor of these tools touches a device, so torch need not load one.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from post_training.checkpoint.command_line import add_common_options, known_checksums, run_tool  # noqa: E402
from post_training.checkpoint.conversion import Conversion  # noqa: E402
from post_training.checkpoint.huggingface import open_huggingface  # noqa: E402
from post_training.checkpoint.layout_options import add_layout_options, layout_form  # noqa: E402
from post_training.checkpoint.shard_conversion import to_shards  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--load-dir", type=Path, metavar="DIR", required=True, help="folder of the HuggingFace checkpoint"
    )
    parser.add_argument("--save-dir", type=Path, metavar="DIR", required=True, help="folder to write; empty or new")
    add_layout_options(parser, "target")
    add_common_options(parser)
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace) -> Conversion:
    """Return the conversion that the options ask for."""
    folder = open_huggingface(options.load_dir)
    checksums = known_checksums(options)
    return to_shards(folder, options.save_dir, lambda shape: layout_form(options, "target", shape), checksums)


if __name__ == "__main__":
    escape_output()
    sys.exit(run_tool(parse_arguments(), plan))
