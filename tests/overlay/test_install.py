import asyncio
import functools
import inspect
import pickle

import pytest

from overlay import TargetError
from overlay.install import replaced, wrapped


def marked(function):
    function.mark = ["dispatch"]
    return function


@marked
def upstream(left: int, right: int = 2) -> int:
    """Upstream's text."""
    return left + right


def doubled(original, *args, **kwargs):
    return 2 * original(*args, **kwargs)


def mine(left, right=3):
    return left * right


def test_a_wrap_is_a_plain_function_that_looks_like_upstreams():
    installed = wrapped(upstream, doubled)
    assert inspect.isfunction(installed) and installed(1) == 6 and installed(left=1, right=1) == 4
    assert installed.mark is upstream.mark and installed.__wrapped__ is upstream
    assert (installed.__name__, installed.__qualname__, installed.__module__) == ("upstream", "upstream", __name__)
    assert inspect.signature(installed) == inspect.signature(upstream)


def test_a_replacement_keeps_upstreams_names_and_marks_and_its_own_defaults():
    installed = replaced(upstream, mine)
    assert inspect.isfunction(installed) and installed(4) == 12
    assert installed.mark is upstream.mark and installed.__doc__ == "Upstream's text."
    assert (installed.__name__, installed.__module__) == ("upstream", __name__)
    assert str(inspect.signature(installed)) == "(left, right=3)" and mine.__name__ == "mine"


def test_a_replacement_takes_the_arguments_of_its_body():
    """Keyword defaults are in another attribute than positional ones, and a body may be a closure."""
    known = {"of the closure": 7}

    def body(first, /, second=2, *rest, third, fourth: int = 4, **more):
        return first, second, rest, third, fourth, more, known

    async def waiting(first, *, second="two"):
        return first, second, known

    calls = [
        ((1,), {"third": 3}),
        ((1, 5, 6), {"third": 3, "fourth": 8, "fifth": 9}),
        ((1,), {"second": 0, "third": 3}),
    ]
    for raw in (upstream, staticmethod(upstream)):
        installed = replaced(raw, body)
        installed = installed.__func__ if isinstance(installed, staticmethod) else installed
        assert [installed(*given, **named) for given, named in calls] == [
            body(*given, **named) for given, named in calls
        ]
        assert str(inspect.signature(installed)) == str(inspect.signature(body))
    assert asyncio.run(replaced(waiting, waiting)(1)) == (1, "two", known)
    with pytest.raises(TypeError, match="third"):
        replaced(upstream, body)(1)


def test_both_pickle_by_upstreams_name(monkeypatch):
    for installed in (wrapped(upstream, doubled), replaced(upstream, mine)):
        monkeypatch.setitem(globals(), "upstream", installed)
        assert pickle.loads(pickle.dumps(installed)) is installed
        monkeypatch.undo()


def test_descriptor_kinds_are_kept():
    class Sample:
        @staticmethod
        def static(value):
            return value

        @classmethod
        def of_class(cls, value):
            return (cls.__name__, value)

        @property
        def size(self):
            """How big."""
            return 5

        @size.setter
        def size(self, value):
            self.seen = value

        @functools.cached_property
        def cached(self):
            return [7]

        @marked
        def method(self, value):
            return value

    for name in ("static", "of_class", "size", "cached", "method"):
        raw = vars(Sample)[name]
        installed = wrapped(raw, lambda original, *args: (original(*args), "ours"))
        assert type(installed) is type(raw)
        setattr(Sample, name, installed)
    sample = Sample()
    assert Sample.static(1) == (1, "ours") and sample.of_class(2) == (("Sample", 2), "ours")
    assert sample.size == (5, "ours") and vars(Sample)["size"].__doc__ == "How big."
    sample.size = 9
    assert sample.seen == 9 and sample.cached == ([7], "ours") and sample.cached is sample.cached
    assert sample.method(3) == (3, "ours") and Sample.method.mark == ["dispatch"]


def test_a_coroutine_function_stays_one():
    async def fetch(value):
        return value

    async def body(original, value):
        return await original(value) + 1

    installed = wrapped(fetch, body)
    assert inspect.iscoroutinefunction(installed) and asyncio.run(installed(1)) == 2


def test_a_cached_function_keeps_its_cache_controls():
    cached = functools.lru_cache(lambda: object())
    installed = wrapped(cached, lambda original: original())
    assert installed() is installed() and installed.cache_info().hits == 1
    installed.cache_clear()
    assert installed.cache_info().currsize == 0


def test_a_value_is_computed_from_upstreams_or_made_anew():
    assert wrapped((1, 2), lambda value: (*value, 3)) == (1, 2, 3)
    assert replaced(5, lambda: 6) == 6


def test_classes_are_neither_wrapped_nor_replaced_by_functions():
    with pytest.raises(TargetError, match="Wrap its __init__"):
        wrapped(dict, doubled)
    with pytest.raises(TargetError, match="a class must be replaced by a class"):
        replaced(dict, mine)
    with pytest.raises(TargetError, match="a class must be replaced by a class"):
        replaced(upstream, dict)
    assert replaced(dict, int) is int
