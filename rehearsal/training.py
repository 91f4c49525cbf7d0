"""A training whose Ray workers are forked: `python -m rehearsal.training --config-name rehearsal key=value ...`.

The same as `python -m verl_patches.trainer.main_ppo` with the same arguments, and the same result. It starts sooner, on
a small machine without an NPU.
"""

import sys

from rehearsal.prefork import Template, start_template
from verl_patches.trainer import main_ppo

# What a forked worker finds already imported: the overlay first, so that it sees every later import.
MODULES = ("verl_patches.prelude_patch", "torch", "verl.workers.megatron_workers", "vllm")


def start_workers() -> Template:
    """The process that Ray's workers are forked from."""
    return start_template(MODULES)


if __name__ == "__main__":
    sys.exit(main_ppo.main(start_workers=start_workers))
