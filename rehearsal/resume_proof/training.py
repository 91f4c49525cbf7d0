"""A training that can be held at one place: `rehearsal.training` with `held_workers`."""

import sys

from rehearsal.prefork import Template, start_template
from rehearsal.training import MODULES
from verl_patches.trainer import main_ppo


def start_workers() -> Template:
    """The process that Ray's workers are forked from."""
    return start_template((*MODULES, "rehearsal.resume_proof.held_workers"))


if __name__ == "__main__":
    sys.exit(main_ppo.main(start_workers=start_workers))
