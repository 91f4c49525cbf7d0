"""Draws the data of `rehearsal.image_task`: `python -m rehearsal.make_image_task --output_dir DIR`."""

import argparse
import sys
from pathlib import Path

from rehearsal.image_task import write_image_task


def main(arguments: list[str]) -> int:
    """Writes train.parquet and test.parquet; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1024)
    options = parser.parse_args(arguments)
    try:
        write_image_task(options.output_dir, options.seed, options.rows)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
