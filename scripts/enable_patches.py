#!/usr/bin/env python3
"""Apply the patches in every process of this Python that imports verl, whatever command starts it.

Installs two small files in this Python's site-packages: `python3 -m verl.trainer.main_ppo ...` and Ray's workers then
run with the patches, and verl stays unedited. A process that does not import verl is unaffected. The assembled
workspace has its own line in verl/__init__.py and does not need this.

Examples:
    python scripts/enable_patches.py
    python scripts/enable_patches.py --status
"""

import argparse
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from overlay import startup  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402

PACKAGE, PRELUDE = "verl", "verl_patches.prelude_patch"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--remove", action="store_true", help="remove the two files")
    action.add_argument("--status", action="store_true", help="print whether they are installed; exit code 1 if not")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Install or remove the files, or print their status, and return the exit code."""
    options, folder = parse_arguments(arguments), Path(sysconfig.get_path("purelib"))
    try:
        if options.status:
            root = startup.installed_root(PACKAGE, folder)
            print(f"{sys.executable}: " + (f"verl is imported with the patches of {root}" if root else "not enabled"))
            return 0 if root else 1
        if options.remove:
            removed = startup.remove(PACKAGE, folder)
            print(f"removed from {folder}" if removed else f"nothing to remove in {folder}")
            return 0
        startup.install(PACKAGE, PRELUDE, ROOT, folder)
        print(f"every process of {sys.executable} that imports verl has the patches of {ROOT}")
    except OSError as error:
        print(
            f"error: {folder} cannot be written ({error.strerror}). Use the Python of your own environment.",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
