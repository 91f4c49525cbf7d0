"""``python -m npu_emulator run [OPTIONS] -- COMMAND ...``"""

import argparse
import sys

from . import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m npu_emulator", description="The emulated NPU.")
    commands = parser.add_subparsers(dest="command_name", required=True)
    run.add_arguments(
        commands.add_parser("run", help="run a command on emulated dies of its own", description=run.__doc__)
    )
    return run.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
