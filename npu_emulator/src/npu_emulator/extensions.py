"""Extensions that their authors build for the NPU at run time, with ``torch.utils.cpp_extension.load``.

Such an extension is a pybind11 module around kernels of CANN: its sources include CANN's headers and it links
libraries of CANN or torch_npu, neither of which is here. Instead of compiling it, the functions that its sources
export (``m.def("name", ...)``) are looked up among the operators of `npu_emulator.operators.extension_kernels`; one
that is not there can be loaded, and raises NotImplementedError when it is called. Other extensions are compiled.
"""

import functools
import re
import types
from collections.abc import Iterable
from pathlib import Path

NPU_LIBRARIES = ("-lascendcl", "-ltorch_npu", "-latb")
_EXPORTED = re.compile(r"""\bm\.def\(\s*"(\w+)\"""")


def exported_functions(sources: Iterable[str | Path]) -> list[str]:
    """Names that the C++ sources bind with pybind11, in their order, each once."""
    names = (name for source in sources for name in _EXPORTED.findall(Path(source).read_text(errors="replace")))
    return list(dict.fromkeys(names))


def is_for_npu(link_flags: Iterable[str] | None) -> bool:
    return any(flag in NPU_LIBRARIES for flags in link_flags or () for flag in flags.split())


def emulated_module(name: str, sources: Iterable[str | Path]) -> types.ModuleType:
    """A module with the functions that an extension would export."""
    from .operators import exposed

    module = types.ModuleType(name, f"{name}, emulated")
    kernels = exposed("npu_extension")
    for function in exported_functions(sources):
        setattr(module, function, kernels.get(function) or _not_emulated(name, function))
    return module


def _not_emulated(extension: str, function: str):
    def refuse(*args, **kwargs):
        raise NotImplementedError(f"{function} of the extension {extension} is not emulated")

    return refuse


def intercept() -> None:
    """Make torch.utils.cpp_extension.load serve extensions for the NPU, and compile all others as before."""
    from torch.utils import cpp_extension

    compile_and_load = cpp_extension.load

    @functools.wraps(compile_and_load)
    def load(name, sources, extra_cflags=None, extra_cuda_cflags=None, extra_ldflags=None, *args, **kwargs):
        if is_for_npu(extra_ldflags):
            return emulated_module(name, [sources] if isinstance(sources, str) else sources)
        return compile_and_load(name, sources, extra_cflags, extra_cuda_cflags, extra_ldflags, *args, **kwargs)

    cpp_extension.load = load
