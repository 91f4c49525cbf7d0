"""torch_npu.profiler: traces of operator calls, in the files that Ascend PyTorch Profiler leaves."""

from .experimental_config import AiCMetrics, ExportType, ProfilerLevel, _ExperimentalConfig
from .profiler import (
    ProfilerAction,
    ProfilerActivity,
    analyse,
    profile,
    schedule,
    supported_activities,
    tensorboard_trace_handler,
)

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
    "supported_activities",
    "tensorboard_trace_handler",
]
