"""A patch whose feature is off only calls upstream's own function: with the arguments of the call, in the surroundings
of the call, returning its result. Switched on, every patch has an effect (tests/demonstrations)."""

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
import torch

from overlay.definitions import find_definition, imported_module
from tests.demonstrations import INERT, all_switched_on, demonstrations, effects, installed, observed
from tests.overlay.around_the_call import differences, open_blocks, state
from tests.overlay.test_real_patches import NAMED, PATCHES, PINS, source_of, sources_of
from verl_patches.features import settings

SWITCHED = [pytest.param(patch, id=patch.label) for patch in PATCHES if patch.switch and patch.kind == "wrap"]


@pytest.fixture
def everything_off(monkeypatch):
    """Return the settings of a process in which no feature is on."""
    off = settings.OverlaySettings.all_off()
    monkeypatch.setattr(settings, "current", lambda: off)


@pytest.fixture
def everything_on(monkeypatch):
    """Return the settings of a process in which every feature is on."""
    monkeypatch.setattr(settings, "_current", all_switched_on())


def upstream_function(module: str, name: str) -> ast.FunctionDef:
    """Return the definition of a target, followed through imports."""
    (node, *_) = find_definition(ast.parse(source_of(module)), name).nodes
    if isinstance(node, ast.ImportFrom):
        (alias,) = node.names
        is_package = sources_of(PINS.of_module(module).name).modules[module][1]
        return upstream_function(imported_module(node, module, is_package), alias.name)
    assert isinstance(node, ast.FunctionDef)
    return node


class Recorder:
    """Stands for upstream's function: binds the call's arguments to the names of its parameters.

    It returns one object, or as many as the `return` statements of upstream's function give; None if it has none.
    """

    def __init__(self, function: ast.FunctionDef, module: str = "") -> None:
        self.module = module
        arguments = function.args
        self.positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        required = len(self.positional) - len(arguments.defaults)
        self.required = self.positional[:required]
        self.by_keyword = self.positional[required:] + [each.arg for each in arguments.kwonlyargs]
        self.given = {name: MagicMock(name=name) for name in (*self.required, *self.by_keyword)}
        self.calls: list[dict[str, object]] = []
        self.meddled: list[str] = []  # with the surroundings of upstream's function, before or after it is called
        self.result = self._result(list(returned(function.body)))

    def __call__(self, *args, **kwargs):
        bound = dict(zip(self.positional, args, strict=False))
        assert not set(bound) & set(kwargs), "a parameter is given twice"
        self.meddled += open_blocks(sys._getframe(1), self.body.__code__)
        self.meddled += differences(self.before, self._surroundings())
        self.calls.append(bound | kwargs)
        return self.result

    def drive(self, body) -> object:
        """Call a patch's body with one object per parameter; those with a default go by keyword, as callers do."""
        keywords = {name: self.given[name] for name in self.by_keyword}
        self.body, self.before = body, self._surroundings()
        result = body(self, *[self.given[name] for name in self.required], **keywords)
        self.meddled += differences(self.before, self._surroundings())
        return result

    def drive_installed(self, body) -> object:
        """Call the object that the engine puts in the target's place for this body in the same way."""
        return self.drive(lambda upstream, *args, **kwargs: installed(body, upstream)(*args, **kwargs))

    def _surroundings(self) -> dict[str, object]:
        return state(self.given.values(), self.module)

    def _result(self, values: list[ast.expr]) -> object:
        if not values:
            return None
        if isinstance(values[0], ast.Tuple):
            return tuple(MagicMock(name="result") for _ in values[0].elts)
        return MagicMock(name="result")


def returned(body: list[ast.stmt]) -> Iterator[ast.expr]:
    """Yield the values of a function's own `return` statements."""
    for node in body:
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from returned(
                [each for each in ast.iter_child_nodes(node) if isinstance(each, (ast.stmt, ast.excepthandler))]
            )


def questions(function: str, switches: set[str]) -> list[str]:
    """Return the conditions in a function's source that read a switch, by an attribute of its name or the feature."""
    asked = switches | {"is_on", "is_active"}
    return [
        ast.unparse(node.test)
        for node in ast.walk(ast.parse(textwrap.dedent(function)))
        if isinstance(node, (ast.If, ast.IfExp))
        and any(isinstance(part, ast.Attribute) and part.attr in asked for part in ast.walk(node.test))
    ]


@pytest.mark.parametrize("patch", SWITCHED)
def test_a_body_does_not_ask_what_the_engine_has_asked(patch):
    names = {key.name for key in patch.feature.keys if key.path == patch.switch}
    assert questions(inspect.getsource(patch.body), names | {patch.switch.rpartition(".")[2]}) == []


def test_a_question_is_seen():
    body = """
    def body(upstream, self):
        current = settings.current()
        if not current.tracking.enabled or self.other:
            return upstream(self)
        return upstream(self) if RESHARD.is_active() else None
    """
    assert len(questions(body, {"enabled"})) == 2 and len(questions(body, {"precision"})) == 1


@pytest.mark.parametrize("patch", SWITCHED)
def test_off_means_upstreams_own_call(patch, everything_off):
    node = upstream_function(patch.module, patch.qualified_name)
    recorder = Recorder(node, patch.module)
    result = recorder.drive_installed(patch.body)
    assert len(recorder.calls) == 1
    (call,) = recorder.calls
    assert set(call) == set(recorder.given)
    changed = [name for name, value in call.items() if value is not recorder.given[name]]
    assert changed == [] and recorder.meddled == []
    assert result == recorder.result


def test_patch_active_while_off_detected(everything_off):
    recorder = Recorder(ast.parse("def f(a, *, b): return 1").body[0])
    assert recorder.drive(lambda upstream, a, *, b: upstream(a, b=b)) is recorder.result
    recorder.drive(lambda upstream, a, *, b: upstream(b, b=a))
    assert recorder.calls[0] == recorder.given and recorder.calls[1] != recorder.given


def in_no_grad(upstream, a, *, b):
    with torch.no_grad():
        return upstream(a, b=b)


def between_two_changes(upstream, a, *, b):
    held, torch.Tensor.sum = torch.Tensor.sum, None
    result = upstream(a, b=b)
    torch.Tensor.sum = held
    return result


def with_another_variable(upstream, a, *, b):
    os.environ["MEDDLED"] = "1"
    result = upstream(a, b=b)
    del os.environ["MEDDLED"]
    return result


def with_a_mark(upstream, a, *, b):
    a.marked = True
    return upstream(a, b=b)


def that_draws(upstream, a, *, b):
    result = upstream(a, b=b)
    torch.rand(1)
    return result


def inside_another(upstream, a, *, b):
    return in_no_grad(upstream, a, b=b)


def beside_a_block(upstream, a, *, b):
    with torch.no_grad():
        a.size()
    return upstream(a, b=b)


@pytest.mark.parametrize(
    ("body", "meddled"),
    [
        (in_no_grad, ["gradients", "in_no_grad: with torch.no_grad():"]),
        (inside_another, ["gradients", "in_no_grad: with torch.no_grad():"]),
        (between_two_changes, ["torch.Tensor.sum"]),
        (with_another_variable, ["environment"]),
        (with_a_mark, ["argument 0.marked"]),
        (that_draws, ["random numbers"]),
        (beside_a_block, []),
    ],
)
def test_a_patch_that_calls_upstream_in_other_surroundings_while_off_would_be_noticed(everything_off, body, meddled):
    recorder = Recorder(ast.parse("def f(a, *, b): return 1").body[0])
    assert recorder.drive(body) is recorder.result and recorder.calls == [recorder.given]
    assert sorted(set(recorder.meddled)) == meddled


@pytest.mark.parametrize("patch", NAMED)
def test_on_changes_behaviour(patch, everything_on):
    pytest.importorskip("torch_npu")
    demonstration = demonstrations().get(patch.label)
    assert demonstration is not None, f"{patch.describe()}: add what it changes to tests/demonstrations"
    without = observed(demonstration, INERT[patch.kind])
    assert observed(demonstration, INERT[patch.kind]) == without, "what is observed must not vary by itself"
    with_patch = demonstration(patch.body)
    assert with_patch == demonstration(patch.body) and with_patch != without
    kept = effects().get(patch.label)
    assert kept == repr(with_patch), "run `python -m overlay update` if the patch is to do this from now on"


def test_every_demonstration_and_every_effect_is_of_a_patch():
    assert set(demonstrations()) | set(effects()) <= {patch.label for patch in PATCHES}


def test_empty_effect_test_detected():
    assert observed(lambda body: "always the same", print) == observed(lambda body: "always the same", INERT["wrap"])
    assert observed(lambda body: body(lambda: "upstream"), INERT["wrap"]) == "upstream"
    assert observed(lambda body: 1 / 0, print) == "raises ZeroDivisionError"
