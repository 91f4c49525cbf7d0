"""Every function must fit on a screen; split longer ones."""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 60


def too_long(source: str) -> list[str]:
    """Return the functions with too many lines from `def` to their end, not counting decorators."""
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {f"{each.name}:{each.lineno}": (each.end_lineno or 0) - each.lineno + 1 for each in functions}
    return [f"{name} has {lines} lines" for name, lines in lengths.items() if lines > MOST_LINES]


def test_no_function_is_too_long():
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert len(files) > 300
    texts = {str(file): text for file in files if (text := file.read_text()).count("\n") > MOST_LINES}
    assert {file: found for file, text in texts.items() if (found := too_long(text))} == {}


def test_overlong_function_detected():
    body = "    pass\n" * (MOST_LINES - 1)
    fits, does_not = f"@wrap(\n)\ndef fits():\n{body}", f"class C:\n  async def long(self):\n{body}    pass\n"
    assert too_long(fits) == [] and too_long(does_not) == ["long:2 has 61 lines"]
