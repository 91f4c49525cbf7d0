"""A worker's side of a recording: it runs torch_npu's profiler between two calls of the driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from post_training.process_context import process_context
from verl_patches.features import settings
from verl_patches.features.profile.feature import ProfileSettings


class Recorder:
    """Records one step at a time into ``FOLDER/profile/step_N/rank_R_TIME_ascend_pt``, as torch_npu lays it out."""

    def __init__(self) -> None:
        self._profiler: Any = None

    def turn_to(self, step: int | None, rank: int, chosen: ProfileSettings, folder: Path) -> None:
        """End and write the current recording; begin that of `step`, unless it is None or this rank is not chosen."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if step is not None and rank in chosen.ranks:
            torch.npu.synchronize()  # otherwise kernels of earlier work are recorded too
            self._profiler = _profiler(folder / "profile" / f"step_{step}", f"rank_{rank}", chosen)
            self._profiler.start()
            self._profiler.add_metadata_json("training_step", str(step))


def _profiler(folder: Path, name: str, chosen: ProfileSettings) -> Any:
    from torch_npu import profiler

    return profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder), name, analyse_flag=chosen.analyse),
        record_shapes=True,
        experimental_config=profiler._ExperimentalConfig(profiler_level=getattr(profiler.ProfilerLevel, chosen.level)),
    )


def method_of_worker() -> Callable[[Any, int | None], None]:
    """Return the worker method that verl's driver calls on all workers: `profile_step(step)`, with None to end one."""
    from verl.single_controller.base.decorator import Dispatch, register

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def profile_step(self: Any, step: int | None) -> None:
        chosen = settings.current()
        recorder = process_context().of(Recorder)  # of the process: torch_npu has one profiler at a time
        recorder.turn_to(step, self.rank, chosen.profile, Path(chosen.measure.output_dir))

    return profile_step
