"""Chooses what stands behind ``import torch_npu``: the setting ``NPU_EMULATOR_ENGINE``, read when Python starts.

``stand-in`` is this package's own torch_npu. ``cann`` is the published wheel, unmodified, on the emulated CANN. The
emulated libraries are put into the process just before the wheel is imported, so that it finds them by name and no
search path is needed. There are two places for them:

- ``<prefix>/cann-engine`` holds the libraries, the wheel, and what of the package npu_emulator is for this engine, and
  comes first on ``sys.path``. The stand-in is then installed, and the default.
- ``npu_emulator_cann`` beside this file, from the distribution npu-emulator-cann. The wheel is where pip put it, and
  ``cann`` is the only engine.

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
_BROUGHT = Path(__file__).with_name("npu_emulator_cann")
IS_BROUGHT = _BROUGHT.is_dir()
FOLDER = _BROUGHT if IS_BROUGHT else Path(sys.prefix) / "cann-engine"
ENGINES = ("cann",) if IS_BROUGHT else ("stand-in", "cann")
"""Those of this environment, the default first."""
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
        there = "the engine of npu-emulator-cann is" if IS_BROUGHT else "the engines are"
        _refuse(f"{SETTING} is {name}, and {there} {' and '.join(ENGINES)}.")
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
    path, tools = os.environ.get("PATH", ""), str(_TOOLKIT / "bin")
    if tools not in path.split(os.pathsep):  # where set_env.sh puts msprof, which torch_npu's profiler calls
        os.environ["PATH"] = f"{tools}{os.pathsep}{path}"


def _check_neighbours(torch_npu: Path) -> None:
    """Raise RuntimeError where the emulated libraries must not be, or cannot be, beneath this torch_npu."""
    from npu_emulator.presence import refuse_real_npu

    refuse_real_npu(distribution=None)  # Huawei's torch_npu is what these libraries are for
    if not (torch_npu.parent / "lib" / "libtorch_npu.so").exists():
        raise RuntimeError(
            f"npu-emulator-cann is for Huawei's torch_npu, and {torch_npu.parent} is that of npu-emulator: "
            "they need environments of their own"
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        if IS_BROUGHT:
            _check_neighbours(Path(self.path))
        _load_libraries()
        from npu_emulator import meters

        meters.start_writing()  # now, so that at the end it writes after torch_npu has done what waits in its queue
        super().exec_module(module)


class _GraphLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        importlib.import_module("npu_emulator_graph_bridge").install(module)


_LOADERS = {"torch_npu": _Loader, "torchair.npu_fx_compiler": _GraphLoader}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the wheel's torch_npu, and has the libraries loaded before it.

    torchair's module that hands graphs to the graph engine, which is not emulated, gets a bridge when it is loaded.
    """

    def find_spec(self, name, path=None, target=None):
        loader = _LOADERS.get(name)
        if loader is None:
            return None
        folders = path or (None if IS_BROUGHT else [str(FOLDER)])  # None: wherever pip has put it
        spec = importlib.machinery.PathFinder.find_spec(name, folders)
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
    sys.path.insert(0, str(FOLDER / "packages" if IS_BROUGHT else FOLDER))
    sys.meta_path.insert(0, _Finder())
