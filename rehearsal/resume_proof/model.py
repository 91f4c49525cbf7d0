"""Writes the tiny DeepSeek-V3 of a scaled job into a folder: `python -m rehearsal.resume_proof.model FOLDER`.

One made before from the same inputs is kept.
"""

import sys
from pathlib import Path

from rehearsal.plan import DEFAULT_TRAIN_DATA
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from rehearsal.tiny_model.warm_start import WarmStart

KERNEL_WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
"""DeepSeek-V3's own: the kernels of its attention take no others in graphs, on a device and in strict mode."""
# Steps of this model are slow. A proof asks for answers of which some are right, not for a policy worth training.
_WARM_START = WarmStart(steps=80)


def main(folder: Path) -> int:
    """Make it, warm-started; returns the exit code."""
    request = CheckpointRequest(DEFAULT_TRAIN_DATA, 0, warm_start=_WARM_START, changes=tuple(KERNEL_WIDTHS.items()))
    make_checkpoint(request, folder, lambda step, loss: None)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
