#!/usr/bin/env python3
r"""Make the config.json for training in bfloat16 from a model's published one.

Removes quantization_config and sets the number of multi-token prediction layers to 0; everything else stays. Works for
any published model. verl_patches/config.json is made from DeepSeek-V3's.

Example:
    python scripts/make_training_config.py DeepSeek-V3/config.json \
        --output BF16/config.json
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from post_training.command_parser import CommandParser  # noqa: E402
from post_training.models.training_config import training_config  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from post_training.user_files import FileError, read_object  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("published", type=Path, metavar="FILE", help="the model's published config.json, or its folder")
    output = "file to write; may be the published one itself"
    parser.add_argument("--output", type=Path, metavar="FILE", required=True, help=output)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Convert the file and return the exit status."""
    options = parse_arguments(arguments)
    published = options.published / "config.json" if options.published.is_dir() else options.published
    try:
        values = read_object(published)
        made = training_config(values)
        written = options.output.with_name(f"{options.output.name}.new")
        written.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        written.replace(options.output)
    except FileError as error:
        print(f"error: {error}. Pass the config.json of a published model.", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: --output={options.output} cannot be written ({error.strerror}). Choose another file.",
            file=sys.stderr,
        )
        return 2
    print(
        f"{options.output}: "
        + ("as published" if made == values else "without quantisation and multi-token prediction")
    )
    return 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
