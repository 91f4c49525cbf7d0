"""Run `resume_program` with MindSpeed imported before Megatron-core; `facts.<rank>.json` records their paths."""

import json
import os
from pathlib import Path

import torch_npu  # noqa: F401

# Import MindSpeed before Megatron-core.
import verl_plugin.mindspeed

# isort: split
import mindspeed
from megatron.core.optimizer import Adam, distrib_optimizer
from megatron.core.utils import get_te_version

from tests.stack_2026.verl_plugin import resume_program


def main(folder: Path) -> None:
    facts = {
        "mindspeed": mindspeed.__file__,
        "bridges": verl_plugin.mindspeed.__file__,
        "megatron": distrib_optimizer.__file__,
        "of_the_dies": f"{Adam.__module__}.{Adam.__name__}",
        "counts_with_weights": not distrib_optimizer.HAVE_APEX_OR_TE,
        "transformer_engine": str(get_te_version()),
    }
    (folder / f"facts.{os.environ['RANK']}.json").write_text(json.dumps(facts))
    resume_program.main(folder)
