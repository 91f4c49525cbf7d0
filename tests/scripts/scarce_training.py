"""`python -m tests.scripts.scarce_training`: `rehearsal.training` with too little die memory for some updates."""

import sys

from omegaconf import DictConfig

from rehearsal.prefork import Template, start_template
from rehearsal.training import modules_of
from verl_patches.trainer import main_ppo


def start_workers(config: DictConfig) -> Template:
    """Start the process from which Ray's workers are forked."""
    return start_template((*modules_of(config), "tests.scripts.scarce_workers"))


if __name__ == "__main__":
    sys.exit(main_ppo.main(start_workers=start_workers))
