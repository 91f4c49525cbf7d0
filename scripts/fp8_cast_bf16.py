#!/usr/bin/env python3
r"""Cast an FP8 checkpoint (HuggingFace safetensors) of a known family of models to bfloat16.

Run the same command again to resume an interrupted cast. More in docs/weights.md.

Example:
    python scripts/fp8_cast_bf16.py --input-fp8-hf-path DeepSeek-V3 \
        --output-bf16-hf-path DeepSeek-V3-BF16

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

from post_training.checkpoint.cast import cast_conversion  # noqa: E402
from post_training.checkpoint.command_line import add_common_options, known_checksums, run_tool  # noqa: E402
from post_training.checkpoint.conversion import Conversion  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--input-fp8-hf-path", type=Path, metavar="DIR", required=True, help="folder of the FP8 checkpoint"
    )
    output = "folder to write; empty or new"
    parser.add_argument("--output-bf16-hf-path", type=Path, metavar="DIR", required=True, help=output)
    add_common_options(parser)
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace) -> Conversion:
    """Return the conversion that the options ask for."""
    return cast_conversion(options.input_fp8_hf_path, options.output_bf16_hf_path, known_checksums(options))


if __name__ == "__main__":
    escape_output()
    sys.exit(run_tool(parse_arguments(), plan))
