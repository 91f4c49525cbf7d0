"""MindSpeed's own kernels, which call CANN. MindSpeed compiles them before the runs, and they are kept.

MindSpeed compiles each kernel at its first call, against the headers of torch_npu and of CANN's toolkit, which takes
minutes for all. ``python -m tests.upstream.kernels`` does so with the packages on PYTHONPATH, for TORCH_EXTENSIONS_DIR.
"""

import os
import subprocess
import sys
from pathlib import Path

_TIME_LIMIT = 3000  # seconds
# The kernels that training calls, by MindSpeed's names.
_BUILDERS = (
    "AlgorithmOpBuilder", "FusedEmaAdamWOpBuilder", "GMMOpBuilder", "GMMV2OpBuilder", "GroupMatmulAddOpBuilder",
    "MatmulAddOpBuilder", "MoeTokenPermuteOpBuilder", "MoeTokenUnpermuteOpBuilder", "RingAttentionUpdateOpBuilder",
    "RotaryPositionEmbeddingOpBuilder",
)  # fmt: skip


def compile_kernels(environment: dict[str, str], extensions: Path) -> None:
    """Compile into a folder, in a process with these variables; up-to-date kernels are left alone.

    Raises AssertionError with the end of the compiler's output on failure.
    """
    extensions.mkdir(parents=True, exist_ok=True)
    environment = os.environ | environment | {"TORCH_EXTENSIONS_DIR": str(extensions)}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.upstream.kernels"], env=environment, text=True,
            timeout=_TIME_LIMIT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except BaseException:
        # torch marks a kernel that is being compiled, and whoever finds the mark waits.
        for mark in extensions.glob("*/lock"):
            mark.unlink(missing_ok=True)
        raise
    assert ended.returncode == 0, ended.stdout[-6000:]


def main() -> None:
    from mindspeed import op_builder
    from mindspeed.op_builder.fused_adamw_v2_builder import FusedAdamWV2OpBuilder

    for builder in (*(getattr(op_builder, name) for name in _BUILDERS), FusedAdamWV2OpBuilder):
        builder().load()


if __name__ == "__main__":
    main()
