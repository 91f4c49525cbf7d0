#!/usr/bin/env python3
"""Import a job worker's modules with the overlay on, and fail unless every patch is in effect."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MODULES = (
    "verl_patches.prelude_patch",
    "torch",
    "torch_npu",
    "verl.trainer.main_ppo",
    "verl.workers.megatron_workers",
    "vllm.entrypoints.llm",
    "vllm_ascend.platform",
    "megatron.core",
)


def main() -> int:
    """Check the image; return exit code 0, or 1 after printing a line for every problem."""
    for name in MODULES:
        importlib.import_module(name)
        print(f"imported {name}")
    from vllm.platforms import current_platform

    import overlay

    report = overlay.report()
    print(f"{len(report.applied)} patches applied, {len(report.pending)} wait for modules that are not imported yet")
    ineffective = [name for name, effective in report.effective.items() if not effective]
    for name in ineffective:
        print(f"error: the patch {name} has no effect", file=sys.stderr)
    if not report.applied:
        print("error: no patch was applied", file=sys.stderr)
    # Without vLLM-Ascend's metadata vLLM still starts, but fails when it needs a device.
    if current_platform.device_type != "npu":
        print(f"error: vLLM detected this machine as {type(current_platform).__name__}", file=sys.stderr)
    return 1 if ineffective or not report.applied or current_platform.device_type != "npu" else 0


if __name__ == "__main__":
    sys.exit(main())
