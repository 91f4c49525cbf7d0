import enum
import warnings
from collections.abc import Callable


class ProfilerActivity(enum.Enum):
    CPU = 0
    NPU = 1


class ProfilerAction(enum.Enum):
    NONE = 0
    WARMUP = 1
    RECORD = 2
    RECORD_AND_SAVE = 3


class profile:
    """Takes the calls of a profiler, says that it records nothing, and records nothing."""

    def __init__(self, *args, on_trace_ready=None, **options):
        warnings.warn("torch_npu.profiler is not emulated: no trace will be written", RuntimeWarning, stacklevel=2)
        self.on_trace_ready = on_trace_ready

    def __enter__(self) -> "profile":
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def step(self) -> None:
        pass


def schedule(**steps) -> Callable[[int], ProfilerAction]:
    return lambda step: ProfilerAction.NONE


def tensorboard_trace_handler(dir_name=None, worker_name=None, analyse_flag=True, **options) -> Callable:
    return lambda profiler: None


def analyse(profiler_path: str, **options) -> None:
    raise NotImplementedError("torch_npu.profiler.profiler.analyse is not emulated")
