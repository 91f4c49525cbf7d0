"""``python -m npu_emulator coverage [--meters FOLDER]`` and ``python -m npu_emulator run [OPTIONS] -- COMMAND ...``"""

import argparse
import sys
from pathlib import Path

from . import run


def print_coverage(folder: Path | None) -> None:
    # It is otherwise registered only where vllm-ascend imports its kernels.
    from . import vllm_ascend_kernels  # noqa: F401
    from .coverage import measure

    print(measure(sorted(folder.glob("*.json")) if folder else ()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m npu_emulator", description="The emulated NPU.")
    commands = parser.add_subparsers(dest="command_name", required=True)
    coverage = commands.add_parser("coverage", help="list the operators of torch_npu: emulated, called, not emulated")
    coverage.add_argument("--meters", type=Path, metavar="FOLDER", help="files that NPU_EMULATOR_METERS left")
    run.add_arguments(
        commands.add_parser("run", help="run a command on emulated dies of its own", description=run.__doc__)
    )
    options = parser.parse_args()
    if options.command_name == "run":
        return run.run(options)
    print_coverage(options.meters)
    return 0


if __name__ == "__main__":
    sys.exit(main())
