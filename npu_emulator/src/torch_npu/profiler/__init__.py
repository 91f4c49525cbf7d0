"""torch_npu.profiler: accepts the options of the real one; recording is not emulated, so it writes no trace."""

from .experimental_config import AiCMetrics, ExportType, ProfilerLevel, _ExperimentalConfig
from .profiler import ProfilerAction, ProfilerActivity, analyse, profile, schedule, tensorboard_trace_handler

__all__ = [
    "AiCMetrics",
    "ExportType",
    "ProfilerAction",
    "ProfilerActivity",
    "ProfilerLevel",
    "_ExperimentalConfig",
    "analyse",
    "profile",
    "schedule",
    "tensorboard_trace_handler",
]
