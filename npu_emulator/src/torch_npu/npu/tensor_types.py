"""torch.npu.FloatTensor and its kin: the types that a tensor on an NPU is an instance of."""

import torch

_DTYPES = {
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float": torch.float32,
    "Double": torch.float64,
}


class _TensorTypeMeta(type):
    def __instancecheck__(cls, instance) -> bool:
        return isinstance(instance, torch.Tensor) and instance.device.type == "npu" and instance.dtype == cls.dtype

    def __call__(cls, *args):
        if len(args) == 1 and isinstance(args[0], (list, tuple, torch.Tensor)):
            return torch.as_tensor(args[0], dtype=cls.dtype, device="npu")
        return torch.empty(args, dtype=cls.dtype, device="npu")


def tensor_types() -> dict[str, type]:
    """The types by name, as torch.npu has them."""
    return {
        f"{name}Tensor": _TensorTypeMeta(f"{name}Tensor", (), {"dtype": dtype, "__module__": "torch.npu"})
        for name, dtype in _DTYPES.items()
    }
