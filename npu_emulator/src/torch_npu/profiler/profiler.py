"""When to record, and where to. Recording itself is done by the device."""

import datetime
import enum
import json
import os
import socket
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from npu_emulator import _C

from .experimental_config import _ExperimentalConfig
from .trace import STEP_NAME, Recording, chrome_trace, write_folder


class ProfilerActivity(enum.Enum):
    CPU = 0
    NPU = 1


class ProfilerAction(enum.Enum):
    NONE = 0
    WARMUP = 1
    RECORD = 2
    RECORD_AND_SAVE = 3


_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


def supported_activities() -> set[ProfilerActivity]:
    return set(ProfilerActivity)


def schedule(*, wait: int, active: int, warmup: int = 0, repeat: int = 0, skip_first: int = 0):
    """What to do in each step: after `skip_first` steps, cycles of `wait`, `warmup` and `active` steps.

    There are `repeat` cycles, or cycles without end if it is 0. Each ends with its trace being saved.
    """
    if min(wait, warmup, repeat, skip_first) < 0 or active < 1:
        raise ValueError("schedule: active must be positive, and no other number of steps negative")
    cycle = wait + warmup + active

    def action(step: int) -> ProfilerAction:
        step -= skip_first
        if step < 0 or (repeat and step >= repeat * cycle):
            return ProfilerAction.NONE
        step %= cycle
        if step < wait:
            return ProfilerAction.NONE
        if step < wait + warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD_AND_SAVE if step == cycle - 1 else ProfilerAction.RECORD

    return action


class profile:
    """Records operator calls and what the dies compute, between `start` and `stop` or by the steps of a schedule.

    Input shapes are recorded with `record_shapes`. The options `profile_memory`, `with_stack`, `with_modules` and
    `with_flops` and databases as a form of export are taken and add nothing; a warning names those asked for.
    """

    def __init__(
        self,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[["profile"], object] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_modules: bool = False,
        with_flops: bool = False,
        experimental_config: _ExperimentalConfig | None = None,
    ):
        ignored = {
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_modules": with_modules,
            "with_flops": with_flops,
            "ExportType.Db": experimental_config is not None and experimental_config.exports_database,
        }
        if any(ignored.values()):
            names = ", ".join(name for name, asked in ignored.items() if asked)
            warnings.warn(f"torch_npu.profiler: not emulated, adds nothing to the trace: {names}", stacklevel=2)
        self.activities = set(activities) if activities else supported_activities()
        self.schedule = schedule or (lambda step: ProfilerAction.RECORD)
        self.on_trace_ready = on_trace_ready
        self.record_shapes = record_shapes
        self.experimental_config = experimental_config or _ExperimentalConfig()
        self.step_num = 0
        self.metadata: dict[str, object] = {}
        self.recording: Recording | None = None
        self._action = ProfilerAction.NONE
        self._step_annotation: torch.autograd.profiler.record_function | None = None

    def __enter__(self) -> "profile":
        self.start()
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    def start(self) -> None:
        self._enter(self.schedule(self.step_num))

    def stop(self) -> None:
        """End the recording, if one is under way, and hand it to `on_trace_ready`."""
        self._end_step()
        if self._action in _RECORDING:
            self._save()
        self._action = ProfilerAction.NONE

    def step(self) -> None:
        """The next step begins."""
        self._end_step()
        if self._action == ProfilerAction.RECORD_AND_SAVE:
            self._save()
            self._action = ProfilerAction.NONE
        self.step_num += 1
        self._enter(self.schedule(self.step_num))

    def add_metadata(self, key: str, value: str) -> None:
        self.metadata[key] = value

    def add_metadata_json(self, key: str, value: str) -> None:
        self.metadata[key] = json.loads(value)

    def export_chrome_trace(self, output_path: str) -> None:
        """The timeline of what was recorded last."""
        if self.recording is None:
            raise RuntimeError("Profiler must be stopped, having recorded, before its trace can be exported")
        Path(output_path).write_text(json.dumps(chrome_trace(self.recording)))

    def _enter(self, action: ProfilerAction) -> None:
        if action in _RECORDING:
            if self._action not in _RECORDING:
                _C.start_recording(self.record_shapes)
            self._step_annotation = torch.autograd.profiler.record_function(f"{STEP_NAME}{self.step_num}")
            self._step_annotation.__enter__()
        elif self._action in _RECORDING:
            self._save()
        self._action = action

    def _end_step(self) -> None:
        if self._step_annotation is not None:
            self._step_annotation.__exit__(None, None, None)
            self._step_annotation = None

    def _save(self) -> None:
        torch.npu.synchronize()
        self.recording = Recording(_C.stop_recording(), self.activities, self.metadata)
        if self.on_trace_ready is not None:
            self.on_trace_ready(self)


def tensorboard_trace_handler(
    dir_name: str | None = None, worker_name: str | None = None, analyse_flag: bool = True, **options
) -> Callable[[profile], None]:
    """Writes each recording to a folder ``<worker>_<time>_ascend_pt`` below `dir_name` or the current folder."""
    parent = Path(dir_name or os.environ.get("ASCEND_WORK_PATH") or ".")
    worker = worker_name or f"{socket.gethostname()}_{os.getpid()}"

    def write(profiler: profile) -> None:
        time = datetime.datetime.now().strftime("%Y%m%d%H%M%S%f")[:-3]
        write_folder(profiler.recording, parent / f"{worker}_{time}_ascend_pt")

    return write


def analyse(profiler_path: str, max_process_number: int | None = None, **options) -> None:
    """Analyse raw data below a path later. There are none: every trace is complete when it is written."""
    if not Path(profiler_path).is_dir():
        raise FileNotFoundError(profiler_path)
