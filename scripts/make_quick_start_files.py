"""Write a tiny model and data like GSM8K for verl's Ascend quick start.

With HOME set to the folder, the quick start's own commands find them where
they look for Qwen3-0.6B and GSM8K. A model that is there is kept.

Example:
    python scripts/make_quick_start_files.py --home outputs/quick_start
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from post_training.command_parser import CommandParser
from post_training.terminal import escape_output

_STEPS_PER_LINE = 20


def main(arguments: list[str]) -> int:
    """Write model and data, and return the exit status."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--home", type=Path, metavar="DIR", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of model and data (default: %(default)s)")
    options = parser.parse_args(arguments)
    from rehearsal.quick_start import DATASET, MODEL, write_dataset, write_model

    def show(step: int, loss: float) -> None:
        if step % _STEPS_PER_LINE == 0:
            print(f"teaching the form of answers: step {step}, loss {loss:.3f}", flush=True)

    try:
        written = write_model(options.home / MODEL, options.seed, show)
        write_dataset(options.home / DATASET, options.seed)
    except OSError as error:
        print(f"--home={options.home} is invalid: {error}. Set it to your own folder.", file=sys.stderr)
        return 1
    print(f"{'wrote' if written else 'kept'} the model in {options.home / MODEL}")
    print(f"wrote the data in {options.home / DATASET}")
    return 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main(sys.argv[1:]))
