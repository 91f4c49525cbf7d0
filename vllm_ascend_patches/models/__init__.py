"""vLLM-Ascend uses a model of Qwen2.5-VL whose weights training can update."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest import mock

from overlay import wrap
from verl_patches.features.compatibility.feature import IMAGES

_OPTIMIZED = "USE_OPTIMIZED_MODEL"


@wrap(
    "vllm_ascend.models:register_model",
    feature=IMAGES,
    evidence="executed",
    why="by default it registers a Qwen2.5-VL whose vision tower pads its heads as it loads, so that weights fit only "
    "once, and exchanges patches among all ranks of the job, whose engines have different images",
    upstream="not forwarded: USE_OPTIMIZED_MODEL=0 is vLLM-Ascend's own switch for it",
    remove_when="the optimised Qwen2.5-VL of the pinned vLLM-Ascend loads weights again and stays within an engine",
)
def register_model(upstream: Callable[[], None]) -> None:
    with mock.patch.dict(os.environ, {_OPTIMIZED: "0"}):
        upstream()
