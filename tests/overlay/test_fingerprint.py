import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlay.definitions import find_definition
from overlay.fingerprint import fingerprint
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
def test_what_is_only_written_differently_is_the_same(change):
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


def test_annotations_count_as_code_only():
    changed = of(ORIGINAL.replace("-> int", "-> float").replace("b: int", "b"))
    assert changed.code != of(ORIGINAL).code
    assert (changed.behaviour, changed.call) == (of(ORIGINAL).behaviour, of(ORIGINAL).call)
    assert of("class C:\n    x: int", "C").behaviour != of("class C:\n    y: int", "C").behaviour


def test_the_signature_is_readable():
    assert of(ORIGINAL).signature == "(a, b=1, *args, key=None, **rest)"
    assert of("def f(a, /, b=None, *, c, d='x'): ...").signature == "(a, /, b=None, *, c, d='x')"


SCRIPT = """
import ast, hashlib, json, sys
sys.path.insert(0, sys.argv[1])
from fingerprint import fingerprint
total, digest, failed = 0, hashlib.sha256(), []
for path in json.load(sys.stdin):
    try:
        tree = ast.parse(open(path, "rb").read())
    except SyntaxError:
        failed.append(path)
        continue
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            total += 1
            digest.update(repr(fingerprint([node])).encode())
print(json.dumps([total, digest.hexdigest(), failed]))
"""


def interpreters():
    """The Python versions 3.9 to 3.13 found on this machine, by version."""
    found = {}
    places = [Path(folder) for folder in os.environ.get("PATH", "").split(":")]
    places += sorted(Path("~/.pyenv/versions").expanduser().glob("3.*/bin"))
    for place in places:
        for minor in range(9, 14):
            file = place / f"python3.{minor}"
            if f"3.{minor}" not in found and file.exists():
                if subprocess.run([file, "-c", ""], capture_output=True, check=False).returncode == 0:
                    found[f"3.{minor}"] = file
    return found


def source_files(*packages):
    specs = [importlib.util.find_spec(package) for package in packages]
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations]
    return sorted(str(file) for folder in folders for file in folder.rglob("*.py"))


@pytest.mark.slow
def test_fingerprints_are_the_same_on_every_python():
    # Every tenth file, to keep this short.
    files = source_files("verl", "vllm_ascend", "megatron", "email", "asyncio")[::10]
    pythons = interpreters()
    if len(pythons) < 2:
        pytest.skip("only one Python is installed here")
    command = ["-c", SCRIPT, str(REPOSITORY / "overlay")]
    started = [
        subprocess.Popen([python, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for python in pythons.values()
    ]
    answers = [json.loads(process.communicate(json.dumps(files), timeout=300)[0]) for process in started]
    assert answers[0][0] > 100 and all(answer == answers[0] for answer in answers), (list(pythons), answers)


def test_the_fingerprint_module_stands_alone():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import fingerprint; assert 'overlay' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-c", code, str(REPOSITORY / "overlay")], check=True)
