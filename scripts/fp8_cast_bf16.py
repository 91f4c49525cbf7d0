#!/usr/bin/env python3
"""Casts an FP8 checkpoint (HuggingFace safetensors) of a known family of models to bfloat16.

Interrupted, it goes on where it stopped when the same command is given again. docs/weights.md says more.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    # No tensor of these tools touches a device, so torch need not load one.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from post_training.checkpoint.cast import cast_conversion  # noqa: E402
from post_training.checkpoint.command_line import add_common_options, known_checksums, run_tool  # noqa: E402
from post_training.checkpoint.conversion import Conversion  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-fp8-hf-path", type=Path, required=True, help="folder of the FP8 checkpoint")
    parser.add_argument("--output-bf16-hf-path", type=Path, required=True, help="folder to write; empty or new")
    add_common_options(parser)
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace) -> Conversion:
    """What the options ask for."""
    return cast_conversion(options.input_fp8_hf_path, options.output_bf16_hf_path, known_checksums(options))


if __name__ == "__main__":
    escape_output()
    sys.exit(run_tool(parse_arguments(), plan))
