"""Puts the emulated CANN below Huawei's own torch_npu, in every Python process of the environment.

torch_npu's wheel stays as it was published. The emulated libraries are loaded into the process just before it is
imported, so that it finds them by name and no search path is needed. Standard library only: ``npu_emulator.pth`` calls
`prepare` when Python starts.
"""

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from .cann import FOLDER, library

# Variables that set_env.sh of CANN and of its transformer library set. torch_npu asks for these folders when imported.
_TOOLKIT = FOLDER / "toolkit"
_VARIABLES = {"ASCEND_HOME_PATH": _TOOLKIT, "ASCEND_OPP_PATH": _TOOLKIT / "opp", "ATB_HOME_PATH": _TOOLKIT / "atb"}


def _leave() -> None:
    library().npu_emulator_cann_leave()


def _load_libraries() -> None:
    """Load every emulated library of CANN, after torch's own, whose kernels they use."""
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch would import torch_npu, which is on its way
    try:
        import torch  # noqa: F401
    finally:
        if autoload is None:
            del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
        else:
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = autoload
    for path in sorted((FOLDER / "lib").glob("*.so")):
        ctypes.CDLL(str(path))
    from .process_end import at_process_end

    at_process_end(_leave)
    path, tools = os.environ.get("PATH", ""), str(_TOOLKIT / "bin")
    if tools not in path.split(os.pathsep):  # where set_env.sh puts msprof, which torch_npu's profiler calls
        os.environ["PATH"] = f"{tools}{os.pathsep}{path}"


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        from .presence import refuse_real_npu

        refuse_real_npu()
        _load_libraries()
        from . import meters

        meters.start_writing()  # now, so that at the end it writes after torch_npu has done what waits in its queue
        super().exec_module(module)


class _ChangingLoader(importlib.machinery.SourceFileLoader):
    """Loads a module and then changes it by the function of this package that _CHANGES names."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        name, function = _CHANGES[module.__name__]
        getattr(importlib.import_module(f"{__package__}.{name}"), function)(module)


# Modules whose work has no device here, and the function of this package that changes each when it is loaded.
_CHANGES = {
    "torchair.npu_fx_compiler": ("graph_bridge", "install"),
    "vllm.triton_utils": ("triton_bridge", "install"),
    "triton.backends.nvidia.driver": ("triton_bridge", "hide_cuda"),
    "mindspeed.ops.triton.sort_chunks_by_idx": ("chunk_sorting", "replace"),
    "vllm.v1.worker.block_table": ("slot_mapping", "replace"),
    "vllm_ascend.ops": ("fused_kernels", "register_qkv_rmsnorm_rope"),
    "vllm_ascend.ops.triton.muls_add": ("fused_kernels", "replace_muls_add"),
}
_LOADERS = {"torch_npu": _Loader} | dict.fromkeys(_CHANGES, _ChangingLoader)
# Packages of kernels for CANN that are modules of this package here.
_PROVIDED = {"batch_invariant_ops": "batch_invariant_ops.py"}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the wheel's torch_npu, and has the libraries loaded before it.

    The graph engine and Triton are not emulated: modules that hand work to them are changed when they are loaded.
    Packages of kernels that were compiled for CANN come from here.
    """

    def find_spec(self, name, path=None, target=None):
        if name in _PROVIDED:
            return importlib.util.spec_from_file_location(name, Path(__file__).with_name(_PROVIDED[name]))
        loader = _LOADERS.get(name)
        if loader is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = loader(spec.loader.name, spec.loader.path)
        return spec


def prepare() -> None:
    """Arrange that importing torch_npu loads the emulated libraries, and set the variables that locate CANN."""
    # Overwrites the values of another toolkit, because the libraries are the emulated ones.
    os.environ |= {name: str(folder) for name, folder in _VARIABLES.items()}
    sys.meta_path.insert(0, _Finder())
