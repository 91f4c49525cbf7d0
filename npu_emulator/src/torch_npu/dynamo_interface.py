"""What torch.compile asks of a device."""

import torch
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device


class NpuInterface(DeviceInterface):
    device = torch.npu.device
    Event = torch.npu.Event
    Stream = torch.npu.Stream

    class Worker:
        set_device = staticmethod(torch.npu.set_device)
        current_device = staticmethod(torch.npu.current_device)
        get_device_properties = staticmethod(torch.npu.get_device_properties)

    current_device = staticmethod(torch.npu.current_device)
    set_device = staticmethod(torch.npu.set_device)
    device_count = staticmethod(torch.npu.device_count)
    is_available = staticmethod(torch.npu.is_available)
    stream = staticmethod(torch.npu.stream)
    current_stream = staticmethod(torch.npu.current_stream)
    set_stream = staticmethod(torch.npu.set_stream)
    synchronize = staticmethod(torch.npu.synchronize)
    get_device_properties = staticmethod(torch.npu.get_device_properties)

    @staticmethod
    def get_raw_stream(device_index: int) -> int:
        return 0

    @staticmethod
    def get_compute_capability(device=None) -> str:
        return torch.npu.get_device_name(device)

    @staticmethod
    def exchange_device(device: int) -> int:
        before = torch.npu.current_device()
        torch.npu.set_device(device)
        return before

    @staticmethod
    def maybe_exchange_device(device: int) -> int:
        return torch.npu.current_device() if device < 0 else NpuInterface.exchange_device(device)


def register() -> None:
    register_interface_for_device("npu", NpuInterface)
    for index in range(torch.npu.device_count()):
        register_interface_for_device(f"npu:{index}", NpuInterface)
