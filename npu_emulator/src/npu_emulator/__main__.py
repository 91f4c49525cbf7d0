"""``python -m npu_emulator run [OPTIONS] -- COMMAND ...``"""

import argparse
import sys

from . import run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m npu_emulator",
        description="Use the emulated NPU.",
        epilog=run.EXAMPLE,
        formatter_class=run.help_format,
    )
    commands = parser.add_subparsers(dest="command_name", required=True, metavar="COMMAND")
    run.add_arguments(
        commands.add_parser(
            "run",
            help="run a command on its own emulated dies",
            description=run.DESCRIPTION,
            epilog=run.EXAMPLE,
            formatter_class=run.help_format,
        )
    )
    return run.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
