"""Prints the variables of a stack's rehearsal as NAME=value lines, for the shell."""

from post_training.command_parser import CommandParser
from post_training.environment_files import read_environment
from rehearsal.plan import CHIPS, ENVIRONMENT_FILE

ENVIRONMENT_FILES = {"2025": ENVIRONMENT_FILE, "2026": ENVIRONMENT_FILE.with_name("rehearsal_2026.env")}


def environment_of(stack: str, chip: str | None = None) -> dict[str, str]:
    """Return the variables of a stack, a key of `ENVIRONMENT_FILES`, on a chip of `CHIPS` or the stack's own."""
    environment = read_environment(ENVIRONMENT_FILES[stack])
    return environment if chip is None else environment | {"NPU_EMULATOR_CHIP": CHIPS[chip][1]}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = CommandParser(prog="python -m rehearsal.environment", description=__doc__)
    parser.add_argument("--stack", choices=ENVIRONMENT_FILES, default="2025", help="default: %(default)s")
    parser.add_argument("--chip", choices=sorted(CHIPS), help="default: what the stack's file says")
    options = parser.parse_args(arguments)
    for name, value in environment_of(options.stack, options.chip).items():
        print(f"{name}={value}")


if __name__ == "__main__":
    main()
