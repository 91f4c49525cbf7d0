"""``python -m npu_emulator coverage [--meters FOLDER]``"""

import argparse
from pathlib import Path

# It is otherwise registered only where vllm-ascend imports its kernels.
from . import vllm_ascend_kernels  # noqa: F401
from .coverage import measure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m npu_emulator", description="Look at the emulated NPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    coverage = commands.add_parser("coverage", help="list the operators of torch_npu: emulated, called, not emulated")
    coverage.add_argument("--meters", type=Path, metavar="FOLDER", help="files that NPU_EMULATOR_METERS left")
    options = parser.parse_args()
    files = sorted(options.meters.glob("*.json")) if options.meters else ()
    print(measure(files))


if __name__ == "__main__":
    main()
