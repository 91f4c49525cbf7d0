"""Find a run of lines that two pieces of source share, whatever the names, texts and numbers in them."""

import ast
import io
import keyword
import tokenize


def shapes(source: str) -> list[str]:
    """Return a source's lines in one layout, with uniform names, texts and numbers, without imports and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            kept = node.body[1:] if ast.get_docstring(node) is not None else node.body
            node.body = [each for each in kept if not isinstance(each, (ast.Import, ast.ImportFrom))] or [ast.Pass()]
    lines = (line.strip() for line in ast.unparse(tree).splitlines())
    return [_shape(line) for line in lines if any(character.isalnum() for character in line)]


def longest_shared_run(left: list[str], right: list[str]) -> list[str]:
    """Return the longest run of equal lines that is in both."""
    best = end = 0
    lengths = [0] * (len(right) + 1)
    for row, line in enumerate(left):
        previous = 0
        for column, other in enumerate(right):
            previous, lengths[column + 1] = lengths[column + 1], previous + 1 if line == other else 0
            if lengths[column + 1] > best:
                best, end = lengths[column + 1], row + 1
    return left[end - best : end]


def _shape(line: str) -> str:
    kinds = {tokenize.NUMBER: "0", tokenize.STRING: "''"}
    parts = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            is_name = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
            parts.append("x" if is_name else kinds.get(token.type, token.string))
    except tokenize.TokenError:
        pass
    return " ".join(part for part in parts if part.strip())
