"""Run code written for CUDA on the NPU: importing this module redirects ``torch.cuda`` to ``torch.npu``.

After ``from torch_npu.contrib import transfer_to_npu`` in a process:

- every name of ``torch.npu`` (and of its ``amp``, ``memory``, ``random`` and ``streams`` modules) replaces the one of
  the same name in ``torch.cuda``; names that only ``torch.cuda`` has stay what they were;
- a device given as ``"cuda"``, ``"cuda:1"`` or ``torch.device("cuda", 1)`` means the NPU with the same index, in tensor
  factories, tensor and module methods, ``torch.device``, ``torch.Generator``, autocast, ``torch.load``, device meshes;
- the process group backend ``"nccl"`` means ``"hccl"``;
- ``torch.jit.script`` and ``torch.jit.script_method`` return their argument as it is, so that the code runs eagerly.

Names copied out of torch before this import (``from torch.cuda import current_device``) keep their CUDA meaning.
"""

import functools
import inspect

import torch
import torch.distributed as dist
import torch.utils._device

import torch_npu  # noqa: F401  (registers the npu device)

_NativeDevice = torch.device
_NativeGenerator = torch.Generator
_FACTORIES = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted empty_strided eye full "
    "full_like hamming_window hann_window kaiser_window linspace logspace normal ones ones_like rand rand_like randint "
    "randint_like randn randn_like randperm range scalar_tensor sparse_coo_tensor sparse_csr_tensor "
    "tensor tril_indices triu_indices zeros zeros_like load set_default_device get_device_module"
).split()
_TENSOR_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros to is_pinned pin_memory".split()
_MIRRORED_MODULES = ("amp", "memory", "random", "streams")


def _to_npu(value):
    """The value with every CUDA device or CUDA device string in it replaced by the NPU of the same index."""
    if type(value) is str:
        return "npu" + value[4:] if value == "cuda" or value.startswith("cuda:") else value
    if type(value) is _NativeDevice and value.type == "cuda":
        return _NativeDevice("npu") if value.index is None else _NativeDevice("npu", value.index)
    return value


def _map_location_to_npu(location):
    if isinstance(location, dict):
        return {_to_npu(saved): _to_npu(wanted) for saved, wanted in location.items()}
    return _to_npu(location)


def _to_hccl(backend):
    if not isinstance(backend, str):
        return backend
    return backend.lower().replace("cuda:", "npu:").replace("nccl", "hccl")


def _redirect(function, convert=_to_npu):
    """The function, called with each argument converted."""

    @functools.wraps(function)
    def redirected(*args, **kwargs):
        return function(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})

    return redirected


def _redirect_argument(function, name, convert):
    """The function, called with its argument `name` converted, whether given by position or by keyword."""
    position = list(inspect.signature(function).parameters).index(name)

    @functools.wraps(function)
    def redirected(*args, **kwargs):
        if name in kwargs:
            kwargs[name] = convert(kwargs[name])
        elif position < len(args):
            args = (*args[:position], convert(args[position]), *args[position + 1 :])
        return function(*args, **kwargs)

    return redirected


class _DeviceMeta(type):
    """Lets the replacement of torch.device be used as a type: for isinstance, as a dictionary key and in schemas."""

    def __call__(cls, *args, **kwargs):
        return _NativeDevice(*map(_to_npu, args), **{name: _to_npu(value) for name, value in kwargs.items()})

    def __instancecheck__(cls, instance):
        return isinstance(instance, _NativeDevice)

    def __subclasscheck__(cls, subclass):
        return subclass is cls or issubclass(subclass, _NativeDevice)

    def __eq__(cls, other):
        return other is cls or other is _NativeDevice

    def __hash__(cls):
        return hash(_NativeDevice)


def _device_type():
    return _DeviceMeta(
        "device", (), {"__module__": "torch", "__qualname__": "device", "__doc__": _NativeDevice.__doc__}
    )


def _autocast_class(native):
    """A subclass of an autocast context manager whose first argument, the device type, may be "cuda"."""

    def __init__(self, device_type, *args, **kwargs):
        native.__init__(self, _to_npu(device_type), *args, **kwargs)

    return type(native.__name__, (native,), {"__init__": __init__, "__module__": native.__module__})


class _GeneratorMeta(type):
    """Makes generators of the native type, which instances of the replacement of torch.Generator then are."""

    def __call__(cls, device="cpu"):
        return _NativeGenerator(_to_npu(device))

    def __instancecheck__(cls, instance):
        return isinstance(instance, _NativeGenerator)


def _generator_type():
    return _GeneratorMeta("Generator", (), {"__module__": "torch", "__doc__": _NativeGenerator.__doc__})


def _mirror_module(source, destination):
    for name, value in list(vars(source).items()):
        if not name.startswith("__") and not inspect.ismodule(value):
            setattr(destination, name, value)


def _redirect_cuda_module():
    _mirror_module(torch.npu, torch.cuda)
    for name in _MIRRORED_MODULES:
        if hasattr(torch.npu, name) and hasattr(torch.cuda, name):
            _mirror_module(getattr(torch.npu, name), getattr(torch.cuda, name))


def _redirect_devices():
    # Caches the factories that `with torch.device(...)` acts on while they are still torch's own functions.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _redirect(getattr(torch, name)))
    torch.load = _redirect(torch.load, _map_location_to_npu)
    torch.device = _device_type()
    torch.Generator = _generator_type()
    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = _autocast_class(torch.amp.autocast)
    for name in _TENSOR_METHODS:
        setattr(torch.Tensor, name, _redirect(getattr(torch.Tensor, name)))
    torch.Tensor.cuda = torch.Tensor.npu
    torch.Tensor.is_cuda = torch.Tensor.is_npu
    torch.nn.Module.to = _redirect(torch.nn.Module.to)
    torch.nn.Module.to_empty = _redirect(torch.nn.Module.to_empty)
    torch.nn.Module.cuda = torch.nn.Module.npu
    for storage in (torch.storage.UntypedStorage, torch.storage.TypedStorage):
        storage.cuda = storage.npu


def _redirect_distributed():
    from torch.distributed import device_mesh, distributed_c10d

    for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        redirected = _redirect_argument(getattr(distributed_c10d, name), "backend", _to_hccl)
        setattr(distributed_c10d, name, redirected)
        setattr(dist, name, redirected)
    # init_device_mesh and DeviceMesh refer to these two by the names bound in their own module.
    device_mesh.init_process_group = distributed_c10d.init_process_group
    device_mesh.new_group = distributed_c10d.new_group
    dist.is_nccl_available = distributed_c10d.is_nccl_available = dist.is_hccl_available
    device_mesh.init_device_mesh = dist.init_device_mesh = _redirect_argument(
        device_mesh.init_device_mesh, "device_type", _to_npu
    )
    device_mesh.DeviceMesh.__init__ = _redirect_argument(device_mesh.DeviceMesh.__init__, "device_type", _to_npu)


def _script_nothing(script):
    """A stand-in for torch.jit.script or script_method that leaves its first argument as it is."""

    @functools.wraps(script)
    def unscripted(obj, *args, **kwargs):
        return obj

    return unscripted


def _disable_script():
    for name in ("script", "script_method"):
        setattr(torch.jit, name, _script_nothing(getattr(torch.jit, name)))


def _apply():
    _redirect_cuda_module()
    _disable_script()
    _redirect_devices()
    if dist.is_available():
        _redirect_distributed()


_apply()
