"""`python -m tests.scripts.scarce_training`: `rehearsal.training` on dies that have too little memory at one place."""

import sys

from omegaconf import DictConfig

from rehearsal.prefork import Template, start_template
from rehearsal.training import modules_of
from verl_patches.trainer import main_ppo


def start_workers(config: DictConfig) -> Template:
    """The process that Ray's workers are forked from."""
    return start_template((*modules_of(config), "tests.scripts.scarce_workers"))


if __name__ == "__main__":
    sys.exit(main_ppo.main(start_workers=start_workers))
