"""Build the object that takes a target's place.

It is a plain function under upstream's own name, module and `__dict__`, in upstream's kind of descriptor, so that
pickle finds it by name, inspection sees upstream's signature and the marks of decorators stay.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from overlay.errors import TargetError

Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrapped(
    raw: Any,
    body: Callable[..., Any],
    called: Callable[[], None] = lambda: None,
    is_on: Callable[[], bool] | None = None,
) -> Any:
    """Return the object to install for a `wrap`.

    Args:
        raw: the object in the target's place.
        body: called with upstream's function and the arguments of the call.
        called: called before every call of the body.
        is_on: asked at every call; while it says False, upstream's function is called instead. None means always.

    Raises:
        TargetError: the target is a class; wrap one of its methods instead. Or a value, which is read and not called,
            so that nothing can ask whether it is on.
    """
    if isinstance(raw, type):
        raise TargetError("a class cannot be wrapped, because isinstance and subclassing need it. Wrap its __init__")
    if _is_value(raw):
        if is_on is not None:
            raise TargetError("a value cannot be patched by a feature that can be off. Wrap its readers")
        called()
        return body(raw)
    return _in_kind(raw, lambda upstream: _calling(upstream, body, called, is_on or _always))


def replaced(raw: Any, body: Callable[..., Any]) -> Any:
    """Return the object to install for a `replace`.

    Raises:
        TargetError: a class is to be replaced by something that is not a class, or the reverse.
    """
    if isinstance(raw, type) != isinstance(body, type):
        raise TargetError("a class must be replaced by a class and a function by a function")
    if isinstance(raw, type):
        return body
    if _is_value(raw):
        return body()
    return _in_kind(raw, lambda upstream: _renamed(upstream, body))


def _always() -> bool:
    return True


def _is_value(raw: Any) -> bool:
    descriptor = isinstance(raw, (staticmethod, classmethod, property, functools.cached_property))
    return not callable(raw) and not descriptor


def _in_kind(raw: Any, make: Make) -> Any:
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(make(raw.__func__))
    if isinstance(raw, property):
        if raw.fget is None:
            raise TargetError("a property without a getter cannot be patched")
        return type(raw)(make(raw.fget), raw.fset, raw.fdel, raw.__doc__)
    if isinstance(raw, functools.cached_property):
        installed = functools.cached_property(make(raw.func))
        installed.attrname = raw.attrname
        return installed
    return make(raw)


def _calling(
    upstream: Callable[..., Any], body: Callable[..., Any], called: Callable[[], None], is_on: Callable[[], bool]
) -> Callable[..., Any]:
    installed: Callable[..., Any]
    if inspect.iscoroutinefunction(upstream):

        async def installed(*args: Any, **kwargs: Any) -> Any:
            if not is_on():
                return await upstream(*args, **kwargs)
            called()
            return await body(upstream, *args, **kwargs)

    else:

        def installed(*args: Any, **kwargs: Any) -> Any:
            if not is_on():
                return upstream(*args, **kwargs)
            called()
            return body(upstream, *args, **kwargs)

    functools.update_wrapper(installed, upstream)
    for name in ("cache_clear", "cache_info", "cache_parameters"):
        if hasattr(upstream, name):
            setattr(installed, name, getattr(upstream, name))
    return installed


def _renamed(upstream: Callable[..., Any], body: Callable[..., Any]) -> FunctionType:
    if not isinstance(body, FunctionType):
        raise TargetError(f"a function must be replaced by a plain function, not by {type(body).__name__}")
    name = getattr(upstream, "__name__", body.__name__)
    installed = FunctionType(body.__code__, body.__globals__, name, body.__defaults__, body.__closure__)
    installed.__kwdefaults__ = body.__kwdefaults__
    installed.__annotations__ = dict(body.__annotations__)
    installed.__doc__ = body.__doc__ or upstream.__doc__
    installed.__module__ = getattr(upstream, "__module__", body.__module__)
    installed.__qualname__ = getattr(upstream, "__qualname__", body.__qualname__)
    marks = {key: value for key, value in getattr(upstream, "__dict__", {}).items() if key != "__wrapped__"}
    installed.__dict__.update(marks)
    return installed
