"""Chooses what stands behind ``import torch_npu``: the setting ``NPU_EMULATOR_ENGINE``, read when Python starts.

``stand-in`` (also when unset) is this package's own torch_npu. ``cann`` is the published wheel, unmodified, on the
emulated CANN: both lie in ``<prefix>/cann-engine``, which then comes first on ``sys.path``. The emulated libraries are
put into the process just before the wheel is imported, so that it finds them by name and no search path is needed.

Standard library only: this runs in every Python process of the environment.
"""

import atexit
import ctypes
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType

SETTING = "NPU_EMULATOR_ENGINE"
FOLDER = Path(sys.prefix) / "cann-engine"
ENGINES = ("stand-in", "cann")
_CORE = "libnpu_emulator_cann.so"
# What set_env.sh of CANN and of its transformer library set. torch_npu asks for these folders when it is imported.
_TOOLKIT = FOLDER / "toolkit"
_VARIABLES = {"ASCEND_HOME_PATH": _TOOLKIT, "ASCEND_OPP_PATH": _TOOLKIT / "opp", "ATB_HOME_PATH": _TOOLKIT / "atb"}


def _refuse(sentence: str) -> None:
    # An exception while Python starts would be printed with its way through the interpreter.
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    os._exit(2)


def selected() -> str:
    """The engine that is set. Ends the process with one sentence where there is no such engine."""
    name = os.environ.get(SETTING) or ENGINES[0]
    if name not in ENGINES:
        _refuse(f"{SETTING} is {name}, and the engines are {' and '.join(ENGINES)}.")
    return name


def library() -> ctypes.CDLL:
    """The emulated CANN of this process."""
    return ctypes.CDLL(str(FOLDER / "lib" / _CORE))


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
    core = library()
    for path in sorted((FOLDER / "lib").glob("*.so")):
        ctypes.CDLL(str(path))
    atexit.register(core.npu_emulator_cann_leave)


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        _load_libraries()
        super().exec_module(module)


class _GraphLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        importlib.import_module("npu_emulator_graph_bridge").install(module)


_LOADERS = {"torch_npu": _Loader, "torchair.npu_fx_compiler": _GraphLoader}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the wheel's torch_npu where Python does, and has the libraries loaded before it.

    torchair's module that hands graphs to the graph engine, which is not emulated, gets a bridge when it is loaded.
    """

    def find_spec(self, name, path=None, target=None):
        if name == "npu_emulator":
            raise ModuleNotFoundError(f"{name} is a package of the engine stand-in; {SETTING} is cann", name=name)
        loader = _LOADERS.get(name)
        if loader is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path or [str(FOLDER)])
        if spec is not None:
            spec.loader = loader(spec.loader.name, spec.loader.path)
        return spec


def select() -> None:
    """Act on the setting. Ends the process with one sentence where the engine is not there."""
    if selected() != "cann":
        return
    if not (FOLDER / "lib" / _CORE).exists():
        _refuse(
            f"{SETTING} is cann, and {FOLDER} does not hold that engine: make it with "
            "environment_ensure_cann_engine of scripts/lib/environment.sh, as scripts/test.sh does."
        )
    # Whatever another toolkit or the other engine has put there: the libraries are those of this engine.
    os.environ |= {name: str(folder) for name, folder in _VARIABLES.items()}
    sys.path.insert(0, str(FOLDER))
    sys.meta_path.insert(0, _Finder())
