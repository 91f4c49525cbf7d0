#!/usr/bin/env python3
"""Exports Megatron shards, or a checkpoint that verl's Megatron workers saved, to a HuggingFace folder.

The layout of shards that convert_ckpt_deepseek3.py wrote is in their manifest.json; for others, give it. Interrupted,
it goes on where it stopped when the same command is given again. docs/weights.md says more.
"""

import argparse
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    # No tensor of these tools touches a device, so torch need not load one.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from post_training.checkpoint.command_line import add_common_options, known_checksums, run_tool  # noqa: E402
from post_training.checkpoint.conversion import Conversion  # noqa: E402
from post_training.checkpoint.layout_options import add_layout_options, layout_form  # noqa: E402
from post_training.checkpoint.shard_conversion import shards_form, to_huggingface  # noqa: E402

_GB = 10**9


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load-dir", type=Path, required=True, help="folder of the shards or of the checkpoint")
    parser.add_argument("--save-dir", type=Path, required=True, help="folder to write; empty or new")
    parser.add_argument(
        "--hf-dir", type=Path, required=True, help="folder with config.json and tokenizer; its weights are not read"
    )
    parser.add_argument("--max-file-gb", type=float, default=5.0, help="size of a safetensors file (default: 5)")
    add_layout_options(parser, "source")
    add_common_options(parser)
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace) -> Conversion:
    """What the options ask for."""
    if not math.isfinite(options.max_file_gb) or options.max_file_gb * _GB < 1:
        raise ValueError(f"--max-file-gb is {options.max_file_gb:g}: it must be a size above 0")
    form, config = shards_form(options.load_dir, lambda shape: layout_form(options, "source", shape), options.hf_dir)
    size = int(options.max_file_gb * _GB)
    return to_huggingface(
        options.load_dir, options.hf_dir, options.save_dir, form, config, size, known_checksums(options)
    )


if __name__ == "__main__":
    sys.exit(run_tool(parse_arguments(), plan))
