import ast
import subprocess
import sys

import pytest

from overlay.definitions import find_definition
from overlay.fingerprint import fingerprint
from tests.overlay import every_python
from tests.overlay.conftest import REPOSITORY

ORIGINAL = '''
def f(a, b: int = 1, *args, key=None, **rest) -> int:
    """A docstring."""
    value: int = a + b
    return {**rest, "x": f"{value!r:>{b}} and" f" {key}"}
'''


def of(source, name="f"):
    return fingerprint(list(find_definition(ast.parse(source), name).nodes))


SAME = {
    "reformatted": ORIGINAL.replace("a + b", "(a\n        +  b)"),
    "docstring changed": ORIGINAL.replace("A docstring.", "Another one."),
    "docstring removed": ORIGINAL.replace('    """A docstring."""\n', ""),
    "commented": ORIGINAL.replace("a + b", "a + b  # why"),
    "type comment": ORIGINAL.replace("a + b", "a + b  # type: int"),
    "other quotes": ORIGINAL.replace('"x"', "'x'"),
    "one f-string": ORIGINAL.replace('and" f" {key}', "and {key}"),
    "renamed": ORIGINAL,
}


@pytest.mark.parametrize("change", SAME)
def test_different_notation_is_the_same(change):
    assert of(SAME[change]) == of(ORIGINAL)
    assert of(ORIGINAL.replace("def f(", "def g("), "g") == of(ORIGINAL)


@pytest.mark.parametrize(
    "before, after",
    [
        ("a + b", "a - b"),
        ("a + b", "b + a"),
        ('"x"', '"y"'),
        ("!r:", "!s:"),
        ("**rest, ", "None: rest, "),
        ("return {", "return not {"),
        ("def f", "async def f"),
        ("def f", "@staticmethod\ndef f"),
        ("value: int = a", "value: int = 1 and a"),
    ],
)
def test_what_does_something_else_differs_in_behaviour_and_not_in_the_call(before, after):
    changed = of(ORIGINAL.replace(before, after))
    assert changed.code != of(ORIGINAL).code and changed.behaviour != of(ORIGINAL).behaviour
    assert changed.call == of(ORIGINAL).call


@pytest.mark.parametrize(
    "before, after",
    [
        ("a, b", "b, a"),
        ("b: int = 1", "b: int = 2"),
        ("b: int = 1", "b: int"),
        ("key=None", "key"),
        ("*args, ", "*, "),
        (", **rest", ""),
        ("a, b", "a, /, b"),
    ],
)
def test_a_changed_signature_is_seen_as_such(before, after):
    assert of(ORIGINAL.replace(before, after)).call != of(ORIGINAL).call


def test_it_matters_which_argument_has_the_default_and_of_what_type_it_is():
    first, second = of("def f(*, a=1, b): ..."), of("def f(*, a, b=1): ...")
    assert first.call != second.call and first.behaviour != second.behaviour
    assert len({of(f"def f(): return {value}").behaviour for value in ("1", "1.0", "True", "'1'")}) == 4


def test_annotations_count_as_code_only():
    changed = of(ORIGINAL.replace("-> int", "-> float").replace("b: int", "b"))
    assert changed.code != of(ORIGINAL).code
    assert (changed.behaviour, changed.call) == (of(ORIGINAL).behaviour, of(ORIGINAL).call)
    assert of("class C:\n    x: int", "C").behaviour != of("class C:\n    y: int", "C").behaviour


def test_the_signature_is_readable():
    assert of(ORIGINAL).signature == "(a, b=1, *args, key=None, **rest)"
    assert of("def f(a, /, b=None, *, c, d='x'): ...").signature == "(a, /, b=None, *, c, d='x')"


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (("a", "b"), ("c", "d", "e"), True),
        (("", "ab", ""), ("cde", ""), True),
        (("ab",), ("cd", "", "e"), True),
        (("b", "a"), ("cde",), False),
        (("ab", "c"), ("de",), False),
        ((), ("abcde",), False),
    ],
)
def test_the_texts_of_an_f_string_may_be_cut_anywhere(before, after, same):
    """Other Python versions split them differently."""
    whole, cut = (ast.parse("def f():\n    return f'ab{x}cde'").body for _ in range(2))
    joined = cut[0].body[0].value
    texts = [[ast.Constant(text) for text in part] for part in (before, after)]
    joined.values = [*texts[0], joined.values[1], *texts[1]]
    assert (fingerprint(cut) == fingerprint(whole)) is same


@pytest.mark.slow
def test_fingerprints_are_the_same_on_every_python():
    # Every tenth file, to keep this short; `python -m tests.overlay.every_python` takes them all.
    pythons, files = every_python.interpreters(), every_python.source_files()[::10]
    if len(pythons) < 2 or not files:
        pytest.skip("only one Python, or no upstream, is installed here")
    answers = list(every_python.fingerprints(pythons, files).values())
    assert answers[0][0] > 100 and all(answer == answers[0] for answer in answers), (list(pythons), answers)


def test_python_specific_fingerprint_detected(tmp_path):
    this = {"this": sys.executable}
    for name, text in {"one.py": "def f(): return 1", "two.py": "def f(): return 2"}.items():
        (tmp_path / name).write_text(text)
    one, two = (every_python.fingerprints(this, [str(tmp_path / name)])["this"] for name in ("one.py", "two.py"))
    assert one[0] == two[0] == 1 and one[1] != two[1]


def test_the_fingerprint_module_stands_alone():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import fingerprint; assert 'overlay' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-c", code, str(REPOSITORY / "overlay")], check=True)
