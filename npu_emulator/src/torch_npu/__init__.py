"""Stand-in for Huawei's torch_npu 2.5.1 on the emulated device; importing it makes torch know the device ``npu``."""

import sys
import types

# The emulator first: it imports torch such that torch does not import this module a second time.
import npu_emulator  # noqa: F401  # isort: skip
import torch

from npu_emulator import aten, collectives, coverage, extensions, import_hooks, meters, operators, toolkit  # noqa: F401

__version__ = "2.5.1.post1"
Format = operators.formats.Format

torch.utils.rename_privateuse1_backend("npu")

from . import npu  # noqa: E402

torch._register_device_module("npu", npu)
unsupported_dtype = [torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True, for_module=True, for_storage=True, unsupported_dtype=unsupported_dtype
)
torch.version.cann = "8.2.RC1"

from . import profiler, utils  # noqa: E402,F401
from ._C import _distributed_c10d  # noqa: E402
from .tensor_methods import install as _install_tensor_methods  # noqa: E402

_install_tensor_methods()


def _expose_operators() -> None:
    """Operators as functions of this module, those of ATB also in ``torch_npu.atb``."""
    module = globals()
    atb = types.ModuleType("torch_npu.atb")
    for name, function in operators.exposed("npu").items():
        module[name] = function
    for name, function in operators.exposed("atb").items():
        setattr(atb, name, function)
        if name.startswith("_npu_"):
            module[name] = function
    module["atb"] = sys.modules["torch_npu.atb"] = atb


def _register_hccl() -> None:
    if not torch.distributed.is_available():
        return
    torch.distributed.Backend.register_backend(
        "hccl", _distributed_c10d.create_backend, extended_api=True, devices=["npu"]
    )
    torch.distributed.is_hccl_available = torch.distributed.distributed_c10d.is_hccl_available = lambda: True


def _register_with_dynamo() -> None:
    from .dynamo_interface import register

    register()


def _make_checkpoint_default() -> None:
    sys.modules["torch.utils.checkpoint"].DefaultDeviceType.set_device_type("npu")


_expose_operators()
_register_hccl()
import_hooks.after_import("torch._dynamo.device_interface", _register_with_dynamo)
import_hooks.after_import("torch.utils.checkpoint", _make_checkpoint_default)
import_hooks.after_import("torch.utils.cpp_extension", extensions.intercept)
import_hooks.stand_in("vllm_ascend.vllm_ascend_C", "npu_emulator.vllm_ascend_kernels")
toolkit.announce()
meters.start_writing()


def _refusal(name: str):
    """A function that says that the operator of this name is not emulated."""

    def not_emulated(*args, **kwargs):
        raise NotImplementedError(f"{name} is not emulated")

    not_emulated.__name__ = name.split(".")[-1]
    return not_emulated


def _refuse_other_operators() -> None:
    """Operators of the real torch_npu that are not emulated say so, wherever they are looked up."""
    for namespace, name in (full.split("::") for full in coverage.measure().not_emulated):
        if namespace not in ("npu", "atb"):
            continue  # those of an extension are refused where it is loaded
        setattr(getattr(torch.ops, namespace), name, _refusal(f"torch.ops.{namespace}.{name}"))
        if namespace == "npu" or name.startswith("_npu_"):
            globals().setdefault(name, _refusal(f"torch_npu.{name}"))
        if namespace == "atb":
            setattr(sys.modules["torch_npu.atb"], name, _refusal(f"torch_npu.atb.{name}"))


_refuse_other_operators()


def __getattr__(name: str):
    if name.startswith(("npu_", "_npu_")):
        return _refusal(f"torch_npu.{name}")
    raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")


def _autoload() -> None:
    """Entry point through which ``import torch`` imports this module."""
