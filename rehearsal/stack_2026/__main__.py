"""The rehearsal of the stack 2026 after rehearse.sh has read the command line and set up the environment."""

import sys

REFUSED = 2


def main() -> int:
    """The command line; returns the exit status."""
    print(
        "error: --stack=2026 is invalid: that stack can be set up and tested, and has no job to rehearse. Set it to"
        " 2025, or run its tests with scripts/test.sh --stack 2026.",
        file=sys.stderr,
    )
    return REFUSED


if __name__ == "__main__":
    sys.exit(main())
