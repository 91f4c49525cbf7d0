#!/usr/bin/env python3
"""Makes every process of a Python that imports verl do so with the patches, whatever command started it.

Two small files in that Python's site-packages are all: `python3 -m verl.trainer.main_ppo ...` and Ray's workers then
need no edit of verl and no other command. A process that does not import verl is not touched. The assembled workspace
has a line of its own in verl/__init__.py and needs none of this.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from overlay import startup  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402

PACKAGE, PRELUDE = "verl", "verl_patches.prelude_patch"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--remove", action="store_true", help="take the two files away again")
    action.add_argument("--status", action="store_true", help="print whether this Python has them; exit code 1 if not")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Installs or removes; returns the exit code."""
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
            f"error: {folder} cannot be written ({error.strerror}): use the Python of an environment of your own.",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
