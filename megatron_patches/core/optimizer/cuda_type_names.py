"""CUDA spelling of tensor type names, for the few places where Megatron decides by that text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Within this context ``torch.Tensor.type()`` of an NPU tensor says ``torch.cuda.FloatTensor`` and the like.

    Conversions with ``type(dtype)`` are not changed. Nested use is allowed; the attribute is put back as it was found.
    """
    import torch

    found = torch.Tensor.__dict__.get("type")
    upstream = torch.Tensor.type

    def type_name_or_conversion(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = upstream(tensor, *args, **kwargs)
        return result.replace("torch.npu.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = type_name_or_conversion
    try:
        yield
    finally:
        if found is None:
            del torch.Tensor.type
        else:
            torch.Tensor.type = found
