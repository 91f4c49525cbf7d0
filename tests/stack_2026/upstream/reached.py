"""The operators of torch_npu that verl 0.9.1, vLLM-Ascend 0.23 and MindSpeed core_r0.16.0 can call."""

import importlib.util
from pathlib import Path

from tests.upstream.operator_scan import CodeBase, scan

MINDSPEED = "MindSpeed-core_r0.16.0"
CODE_BASES = (
    CodeBase(
        "verl",
        "verl",
        (
            "verl.trainer.main_ppo",
            "verl.workers.engine",
            "verl.workers.rollout.vllm_rollout.vllm_async_server",
            "verl.checkpoint_engine",
        ),
    ),
    CodeBase("vllm_ascend", "vllm_ascend", ("vllm_ascend",)),
    CodeBase(MINDSPEED, "mindspeed", ("mindspeed.megatron_adaptor",)),
)


def reached_operators(upstream: Path, scratch: Path) -> list[str]:
    """Return the operators' full names, from the installed sources and the checkout of MindSpeed in `upstream`."""
    assert (upstream / MINDSPEED).is_dir(), f"{upstream} lacks {MINDSPEED}"
    for package in ("verl", "vllm_ascend"):
        installed = Path(importlib.util.find_spec(package).origin).parent
        (scratch / package).mkdir()
        (scratch / package / package).symlink_to(installed)
    (scratch / MINDSPEED).symlink_to(upstream / MINDSPEED)
    return list(scan(scratch, CODE_BASES)["reached"])
