from .scope import npu_stream_switch as NpuStreamSwitch
from .scope import npu_wait_tensor

__all__ = ["NpuStreamSwitch", "npu_wait_tensor"]
