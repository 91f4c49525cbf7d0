"""Triton kernels of vLLM and vLLM-Ascend on the emulated device, run by Triton's own interpreter.

There is no Triton for the emulated device. vLLM then replaces `triton.jit` by a decorator that does nothing, and a
kernel that is launched all the same, such as the one that maps tokens to slots of the cache, ends with a TypeError.
Here it runs in the interpreter of the installed Triton, which copies its tensors to the host and back.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


class InterpretedKernel:
    """A function that vLLM's `triton.jit` decorates: ``kernel[grid](arguments)`` runs it in Triton's interpreter.

    Triton is imported at the first launch.
    """

    def __init__(self, function: types.FunctionType):
        self.__wrapped__ = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self._interpreted: Any = None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self.interpreted()[grid]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError(f"The Triton kernel {self.__name__} is launched as {self.__name__}[grid](...)")

    def interpreted(self) -> Any:
        """Return the function for Triton's interpreter, with the real `triton.language` for vLLM's stand-ins."""
        if self._interpreted is None:
            from triton.runtime.interpreter import InterpretedFunction

            prepare_interpreter()
            function = self.__wrapped__
            names: dict[str, Any] = {}
            copy = types.FunctionType(
                function.__code__, names, function.__name__, function.__defaults__, function.__closure__
            )
            self._interpreted = InterpretedFunction(copy)  # before the names: kernels may call each other
            names.update({name: real(value) for name, value in function.__globals__.items()})
        return self._interpreted


@functools.cache
def prepare_interpreter() -> None:
    """Make Triton's interpreter accept kernels for the NPU.

    The functions of Triton's own library (`tl.randint`, `tl.max`) are kernels too, and must be interpreted where they
    are called. Triton for the NPU takes blocks of any length, Triton itself only those of a power of two.
    """
    import triton._utils
    import triton.experimental.gluon.language  # it wants kernels of the library that are compiled, when it is imported
    import triton.language
    import triton.language.random
    import triton.language.standard
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in (triton.language, triton.language.random, triton.language.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))
    triton._utils.is_power_of_two = lambda length: length > 0
    TritonSemantic.arange = _arange


def _arange(semantic: Any, start: Any, end: Any, *, ret_ty: Any = None) -> Any:
    """As `TritonSemantic.arange`, for any number of elements."""
    import triton.language as tl

    first, last = (int(getattr(bound, "value", bound)) for bound in (start, end))
    if last <= first:
        raise ValueError(f"tl.arange({first}, {last}) has no elements")
    kind = tl.block_type(tl.int32, [last - first]) if ret_ty is None else ret_ty
    return semantic.tensor(semantic.builder.create_make_range(kind.to_ir(semantic.builder), first, last), kind)


def real(value: Any) -> Any:
    """Return the object that a kernel sees in place of vLLM's stand-in, or of another kernel, in its module."""
    if isinstance(value, InterpretedKernel):
        return value.interpreted()
    if type(value).__name__ == "TritonPlaceholder":
        import triton

        return triton
    if type(value).__name__ == "TritonLanguagePlaceholder":
        import triton.language

        return triton.language
    return value


def jit(function: types.FunctionType | None = None, **options: Any) -> Any:
    """Decorate a kernel, with or without options, as `triton.jit` does."""
    if function is None:
        return lambda given: jit(given, **options)
    return InterpretedKernel(function)


def install(module: types.ModuleType) -> None:
    """Make kernels runnable in vLLM's module of Triton (vllm.triton_utils) if it has found no device for them."""
    if not module.HAS_TRITON and find_spec("triton") is not None:
        module.triton.jit = jit


def hide_cuda(module: types.ModuleType) -> None:
    """Say that there is no CUDA device, to Triton's NVIDIA backend (triton.backends.nvidia.driver).

    It asks torch.cuda, which says that there is one behind `transfer_to_npu`, and then looks for the driver's library.
    """
    module.CudaDriver.is_active = staticmethod(lambda: False)
