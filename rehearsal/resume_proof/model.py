"""Writes the tiny model of a scaled job into a folder: `python -m rehearsal.resume_proof.model FOLDER FAMILY`.

One made before from the same inputs is kept.
"""

import sys
from pathlib import Path

from rehearsal.plan import DEFAULT_TRAIN_DATA
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from rehearsal.tiny_model.warm_start import WarmStart

KERNEL_WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
"""DeepSeek-V3's own: the kernels of its attention take no others in graphs, on a device and in strict mode."""
# By family, what is not as in the rehearsal's; layers that two stages share alike, where verl divides them.
_CHANGES = {"deepseek_v3": KERNEL_WIDTHS, "qwen2": {"num_hidden_layers": 4}}
# Steps of these models are slow. A proof asks for answers of which some are right, not for a policy worth training.
_WARM_START = WarmStart(steps=80)


def main(folder: Path, model_type: str) -> int:
    """Make it, warm-started; returns the exit code."""
    changes = tuple(_CHANGES.get(model_type, {}).items())
    request = CheckpointRequest(DEFAULT_TRAIN_DATA, 0, warm_start=_WARM_START, model_type=model_type, changes=changes)
    make_checkpoint(request, folder, lambda step, loss: None)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
