"""Write the rehearsal's own problems: data/arithmetic/train.jsonl and test.jsonl.

Example:
    python scripts/make_arithmetic_data.py --output data/arithmetic
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from post_training.command_parser import CommandParser
from rehearsal.tiny_model.task import split_exercises, write_records


def main(arguments: list[str]) -> int:
    parser = CommandParser(description=__doc__)
    output = "folder for train.jsonl and test.jsonl"
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help=output)
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and the order (default: %(default)s)")
    options = parser.parse_args(arguments)
    training, test = split_exercises(options.seed)
    write_records(training, options.output / "train.jsonl")
    write_records(test, options.output / "test.jsonl")
    print(f"wrote {len(training)} training and {len(test)} test problems to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
