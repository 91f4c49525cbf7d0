"""`scripts/make_tiny_checkpoint.py` with a warm start just long enough to make some answers correct.

A full warm start takes as long as many of the trainings that begin with its model.
"""

import sys
from dataclasses import replace
from unittest import mock

from rehearsal.tiny_model.warm_start import WarmStart
from scripts import make_tiny_checkpoint

STEPS = 80


def main() -> int:
    """Make the checkpoint; the command line is the script's."""
    make = make_tiny_checkpoint.make_checkpoint

    def make_with_short_warm_start(request, *arguments):
        return make(replace(request, warm_start=WarmStart(steps=STEPS)), *arguments)

    with mock.patch.object(make_tiny_checkpoint, "make_checkpoint", make_with_short_warm_start):
        return make_tiny_checkpoint.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
