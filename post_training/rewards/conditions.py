r"""Unify conditions on numbers: sets of reals, set builders, chains of inequalities, systems of equations.

math-verify compares ``x>2`` with ``(2,\infty)``. It cannot read ``\{x \mid x>2\}``, "all real numbers" or ``x<1 or
x>2``, so these become intervals here.
"""

import re
from collections.abc import Callable

EVERYTHING = r"(-\infty,\infty)"
_REALS = r"\\(?:mathbb|mathbf|mathrm|Bbb) ?(?:\{ ?R ?\}|R)|\\R(?:eals)?(?![a-zA-Z])"
_EVERYTHING = re.compile(
    rf"(?:(?:\\forall )?[a-z] ?\\in ?)?(?:{_REALS})|\( ?- ?\\infty ?, ?\+? ?\\infty ?\)"
    r"|- ?\\infty ?(?:<|\\lt) ?[a-z] ?(?:<|\\lt) ?\+? ?\\infty"
)
_EVERYTHING_SAID = re.compile(
    r"(?:[a-z] (?:is|can be|in) )?(?:the )?(?:set of )?"
    r"(?:(?:(?:all|any|every) )?(?:of )?(?:the )?(?:reals|real (?:numbers?|values?))(?: (?:of |for )?[a-z])?"
    r"|(?:all|any|every) real [a-z])"
    "|(?:\u6240\u6709|\u5168\u4f53|\u4e00\u5207|\u4efb\u610f|\u5168\u90e8)?\u5b9e\u6570(?:\u96c6)?"
)
_BUILDER = re.compile(
    rf"\\\{{ ?(?P<name>[a-z]|\\theta) ?(?:\\in ?(?:{_REALS}) ?)?(?:[|:]|\\(?:mid|vert|colon)(?![a-zA-Z])) ?"
    r"(?P<condition>[^|:]*)\\\}"
)
_ALSO_REAL = re.compile(rf"(?:,|\\text ?\{{ ?and ?\}}) ?[a-z] ?\\in ?(?:{_REALS}) ?$")
_OR = re.compile(r"\\text ?\{ ?,? ?or ?\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\(?:lor|vee)(?![a-zA-Z])|\u6216")
_AND = re.compile(r"\\text ?\{ ?,? ?and ?\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:land|wedge)(?![a-zA-Z])|\u4e14|\u548c")
_RELATION = re.compile(
    r"(?P<le><=|\\leq?(?:slant|q)?(?![a-zA-Z]))|(?P<ge>>=|\\geq?(?:slant|q)?(?![a-zA-Z]))"
    r"|(?P<ne>!=|\\neq?(?![a-zA-Z]))|(?P<lt><|\\lt(?![a-zA-Z]))|(?P<gt>>|\\gt(?![a-zA-Z]))|(?P<eq>=)"
)
_FLIPPED = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge", "eq": "eq", "ne": "ne"}
_SIGNS = {"lt": "<", "le": r"\le ", "gt": ">", "ge": r"\ge ", "eq": "=", "ne": r"\ne "}
_NAME = re.compile(r"[a-z]|\\theta|\\alpha|\\beta")
_MOST_CLAUSES = 8
_SYSTEM = re.compile(
    r"\\begin ?\{(?:cases|aligned|array)\}(?: ?\{[^{}]*\})?(?P<lines>.*)\\end ?\{(?:cases|aligned|array)\}", re.DOTALL
)


def in_one_notation(answer: str) -> str:
    """Rewrite conditions as intervals and chains of ``<``; return any other answer unchanged."""
    if _EVERYTHING.fullmatch(answer):
        return EVERYTHING
    if (match := _BUILDER.fullmatch(answer)) is not None and r"\in" not in _ALSO_REAL.sub("", match["condition"]):
        # The name is bound: {y | y>2} is {x | x>2}.
        condition = _ALSO_REAL.sub("", match["condition"]).strip()
        answer = re.sub(rf"(?<![a-zA-Z\\]){re.escape(match['name'])}(?![a-zA-Z])", "x", condition)
        if _EVERYTHING.fullmatch(answer):
            return EVERYTHING
    elif match is not None and _EVERYTHING.fullmatch(match["condition"].strip()):
        return EVERYTHING
    return _as_intervals(answer) or _upward(answer)


def means_everything(said: str) -> bool:
    """Return whether words mean every real number."""
    return _EVERYTHING_SAID.fullmatch(" ".join(said.split())) is not None


def _relations(clause: str) -> tuple[list[str], list[str]]:
    """Return the sides of a chain, and the names of the relations between them."""
    matches = list(_RELATION.finditer(clause))
    ends = [0, *(match.end() for match in matches)]
    begins = [*(match.start() for match in matches), len(clause)]
    sides = [clause[end:begin].strip() for end, begin in zip(ends, begins, strict=True)]
    return sides, [match.lastgroup or "" for match in matches]


def _upward(answer: str) -> str:
    """Turn ``c>b>a`` into ``a<b<c``; a single relation is left to math-verify."""
    sides, relations = _relations(answer)
    if len(relations) < 2 or not {"gt", "ge"}.issuperset(relations) or not all(sides) or "," in answer:
        return answer
    chain = sides[-1]
    for side, relation in zip(sides[-2::-1], relations[::-1], strict=True):
        chain += _SIGNS[_FLIPPED[relation]] + side
    return chain


def _as_intervals(answer: str) -> str | None:
    """Return ``x<1 or x>2`` as a union, ``x>1 and x<2`` as one interval; None for anything else."""
    clauses = [clause.strip(" ,") for clause in _OR.split(answer)]
    if not 1 <= len(clauses) <= _MOST_CLAUSES:
        return None
    found = [_interval(clause) for clause in clauses]
    if len(clauses) == 1 and not (r"\cup" in (found[0] or "") or _AND.search(answer)):
        return None
    if any(interval is None for interval in found):
        return None
    if all((interval or "").startswith(r"\{") for interval in found):
        return None  # x=1 or x=2 is a list of values
    names = {_variable(clause) for clause in clauses}
    return r"\cup ".join(interval or "" for interval in found) if len(names) == 1 else None


def _variable(clause: str) -> str:
    sides, _ = _relations(_AND.split(clause)[0])
    return next((side for side in sides if _NAME.fullmatch(side)), "")


def _interval(clause: str) -> str | None:
    halves = [half.strip(" ,") for half in _AND.split(clause)]
    if len(halves) == 2:
        return _intersection(*halves)
    sides, relations = _relations(clause)
    if len(relations) == 1:
        bound = _bound(clause)
        return None if bound is None else _of_bound(*bound)
    if len(relations) == 2 and _NAME.fullmatch(sides[1]) and sides[0] and sides[2]:
        if {"lt", "le"}.issuperset(relations):
            return _between(relations[0], sides[0], sides[2], relations[1])
        if {"gt", "ge"}.issuperset(relations):
            return _between(_FLIPPED[relations[1]], sides[2], sides[0], _FLIPPED[relations[0]])
    return None


def _between(lower_relation: str, lower: str, upper: str, upper_relation: str) -> str:
    return f"{'[' if lower_relation == 'le' else '('}{lower},{upper}{']' if upper_relation == 'le' else ')'}"


def _bound(clause: str) -> tuple[str, str] | None:
    """Return the relation of a variable to a bound, with the variable first: ``2<x`` is (gt, 2)."""
    sides, relations = _relations(clause)
    if len(relations) != 1 or not all(sides) or "," in clause:
        return None
    for side, other, relation in ((sides[0], sides[1], relations[0]), (sides[1], sides[0], _FLIPPED[relations[0]])):
        if _NAME.fullmatch(side) and not _NAME.fullmatch(other):
            return relation, other
    return None


def _of_bound(relation: str, bound: str) -> str:
    return {
        "lt": rf"(-\infty,{bound})",
        "le": rf"(-\infty,{bound}]",
        "gt": rf"({bound},\infty)",
        "ge": rf"[{bound},\infty)",
        "eq": rf"\{{{bound}\}}",
        "ne": rf"(-\infty,{bound})\cup ({bound},\infty)",
    }[relation]


def _intersection(first: str, second: str) -> str | None:
    """Return the interval of ``x>1 and x<2``: one bound from below and one from above; None for anything else."""
    bounds = [_bound(first), _bound(second)]
    if None in bounds or _variable(first) != _variable(second):
        return None
    found = {relation: bound for each in bounds if each is not None for relation, bound in [each]}
    lower = next((relation for relation in ("gt", "ge") if relation in found), None)
    upper = next((relation for relation in ("lt", "le") if relation in found), None)
    if lower is None or upper is None or len(found) != 2:
        return None
    return _between(_FLIPPED[lower], found[lower], found[upper], upper)


def elements(text: str, separators: str = ",;") -> list[str]:
    """Split a text at the separators outside all brackets."""
    parts, depth, begin, skip = [], 0, 0, False
    for position, character in enumerate(text):
        if skip:
            skip = False
        elif character == "\\":
            skip = True
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character in separators and depth == 0:
            parts.append(text[begin:position].strip())
            begin = position + 1
    return [*parts, text[begin:].strip()]


_VARIABLE = re.compile(r"(?:[a-zA-Z]|\\[a-z]+)(?:_(?:[0-9a-z]|\{[0-9a-z]{1,3}\}))?")
_TOGETHER = re.compile(r"\((?P<names>[^()=]*)\) ?= ?(?P<values>\(.*\))", re.DOTALL)


def assignments(answer: str) -> list[tuple[str, str]] | None:
    r"""Return names and values of ``x=1, y=2``, ``(x,y)=(1,2)`` or a system of such lines; None for anything else."""
    if (system := _SYSTEM.search(answer)) is not None:
        lines = system["lines"].replace("&", "").replace(r"\\", ",")
        answer = ",".join(line.strip() for line in elements(lines) if line.strip())
    if (match := _TOGETHER.fullmatch(answer)) is not None:
        names, values = elements(match["names"]), elements(match["values"][1:-1])
        if len(names) != len(values) or not all(map(_VARIABLE.fullmatch, names)):
            return None
        return list(zip(names, values, strict=True))
    found: list[tuple[str, str]] = []
    for part in (each for clause in _AND.split(_OR.sub(",", answer)) for each in elements(clause) if each):
        name, equals, value = part.partition("=")
        if not equals:
            if not found or _RELATION.search(part) or len({name for name, _ in found}) > 1:
                return None
            found.append((found[0][0], part))
        elif not _VARIABLE.fullmatch(name.strip()) or not value.strip() or _RELATION.search(value):
            return None
        else:
            found.append((name.strip(), value.strip()))
    return found if len(found) > 1 else None


def is_tuple(answer: str) -> bool:
    """Return whether an answer is a tuple such as ``(1,2)``."""
    return answer.startswith("(") and answer.endswith(")") and len(elements(answer)) == 1 and "," in answer


def equal_assignments(truth: str, answer: str, equal: Callable[[str, str], bool]) -> bool | None:
    """Compare two answers if one of them names several values; None if neither does."""
    ours, theirs = assignments(truth), assignments(answer)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None and _are_distinct(ours) and _are_distinct(theirs):
        expected, found = dict(ours), dict(theirs)
        return expected.keys() == found.keys() and all(equal(value, found[name]) for name, value in expected.items())
    if ours is not None and theirs is not None and _letters(ours) != _letters(theirs):
        return False
    for named, other in ((ours, answer), (theirs, truth)):
        if named is not None and is_tuple(other):
            values = [value for _, value in (sorted(named) if _are_distinct(named) else named)]
            parts = elements(other[1:-1])
            pairs = zip(values, parts, strict=False)
            return len(values) == len(parts) and all(
                equal(value, part) if named is ours else equal(part, value) for value, part in pairs
            )
    return equal(_listed(ours, truth), _listed(theirs, answer))


def _are_distinct(named: list[tuple[str, str]]) -> bool:
    """Return whether every name has one value, and the names are not x_1, x_2, the values of one variable."""
    names = [name for name, _ in named]
    return len({*names}) == len(names) and len(_letters(named)) > 1


def _letters(named: list[tuple[str, str]]) -> set[str]:
    """Return the names without their subscripts."""
    return {name.partition("_")[0] for name, _ in named}


def _listed(named: list[tuple[str, str]] | None, answer: str) -> str:
    r"""Return ``x=1, x=2`` as ``1,2``, a list of values in any order."""
    if named is None or len(_letters(named)) > 1:
        return answer
    return ",".join(value for _, value in named)
