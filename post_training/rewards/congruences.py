r"""Congruences: ``x \equiv 3 \pmod{7}`` is ``x \equiv 10 \pmod 7``, and neither modulus nor residue may differ.

math-verify reads ``mod`` as the product of three variables.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

_MODULUS = re.compile(
    r"(?P<bracket>\( ?)?(?:\\(?:pmod|bmod|mod|pod)(?![a-zA-Z])|\\(?:text|mathrm|operatorname|textrm) ?\{ ?\(?mod ?\}"
    r"|(?<![a-zA-Z\\])mod(?:ulo)?(?![a-zA-Z]))"
)
_CONJUNCTIONS = {
    "or": r"\\text ?\{ ?,? ?or ?\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\(?:lor|vee)(?![a-zA-Z])|\u6216",
    "and": r"\\text ?\{ ?,? ?and ?\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:land|wedge)(?![a-zA-Z])|[\u548c\u4e14]",
}
_CLAUSES = re.compile(f"{_CONJUNCTIONS['or']}|{_CONJUNCTIONS['and']}|;")
_EQUIVALENT = re.compile(r"\\equiv(?![a-zA-Z])|\\cong(?![a-zA-Z])|=")
_RESIDUES = re.compile(r",|\\text ?\{ ?,? ?or ?\}|(?<![a-zA-Z])or(?![a-zA-Z])|\u6216")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_LINEAR = re.compile(
    r"(?:(?P<name>[a-z]) ?(?:=|\\equiv) ?)?(?:(?P<first>-?[0-9]{1,9}) ?(?P<sign>[+-]) ?(?P<factor0>[0-9]{1,9})"
    r"(?: ?(?:\\cdot|\*) ?)?(?P<letter0>[kmntl])|(?P<factor1>[0-9]{1,9})(?: ?(?:\\cdot|\*) ?)?(?P<letter1>[kmntl])"
    r"(?: ?(?P<last>[+-] ?[0-9]{1,9}))?)(?:(?:,| |\\text ?\{,? ?(?:where|for)[^{}]*\}|\()*"
    r"(?:[kmntl] ?\\in ?\\mathbb ?\{?Z\}?|k is an integer|\\text ?\{ ?for (?:any )?integers? ?\} ?[kmntl]?) ?\)?)?"
)
_MOST_RESIDUES = 64
_LONGEST_PERIOD = 5000


@dataclass(frozen=True)
class Clause:
    """One congruence.

    Attributes:
        left: may be empty.
        residues, modulus: whole numbers as text, if they are numbers at all.
    """

    left: str
    residues: frozenset[str]
    modulus: str


@dataclass(frozen=True)
class Congruences:
    """All clauses of an answer, and its other parts, such as ``p = 2``."""

    clauses: frozenset[Clause]
    others: tuple[str, ...]


def congruences(answer: str) -> Congruences | None:
    """Take an answer apart; None if it has no modulus."""
    if _MODULUS.search(answer) is None:
        return None
    clauses, others = [], []
    for text in _spans(answer):
        clause = _clause(text)
        if clause is None:
            others.append(text)
        else:
            clauses.append(clause)
    return Congruences(frozenset(clauses), tuple(sorted(others)))


def _spans(answer: str) -> list[str]:
    """Split an answer into clauses: each ends after its modulus, or without one at a conjunction."""
    spans, begin = [], 0
    for match in _MODULUS.finditer(answer):
        end = _end_of_modulus(answer, match)
        spans += _split_before(answer[begin:end])
        begin = max(begin, end)
    spans += [part.strip(" ,") for part in _CLAUSES.split(answer[begin:])]
    return [span for span in spans if span.strip(" ,.")]


def _split_before(text: str) -> list[str]:
    r"""``p=2 \text{ or } p \equiv 1 \pmod 4`` is two; ``x \equiv 1 \text{ or } 3 \pmod 4`` is one."""
    parts = [part.strip(" ,") for part in _CLAUSES.split(text)]
    cut = max((number for number, part in enumerate(parts) if _EQUIVALENT.search(part)), default=0)
    return [*parts[:cut], ",".join(part for part in parts[cut:] if part)]


def _end_of_modulus(answer: str, match: re.Match[str]) -> int:
    rest = answer[match.end() :]
    found = re.match(r" ?(?:\{[^{}]*\}|\([^()]*\)|[0-9]+|[a-zA-Z])", rest)
    end = match.end() + (found.end() if found else 0)
    if match["bracket"] or "(mod" in match.group():
        closed = re.compile(r" ?\)").match(answer, end)
        end = closed.end() if closed else end
    return end


def _clause(text: str) -> Clause | None:
    match = _MODULUS.search(text)
    if match is None:
        return None
    modulus = _whole(text[match.end() :].strip(" (){}"))
    left, *right = _EQUIVALENT.split(text[: match.start()])
    if not right:
        left, right = "", [left]
    if len(right) > 1 or modulus in ("", "0"):
        return None
    residues = {
        _reduced(signed, modulus)
        for part in _RESIDUES.split(right[0])[:_MOST_RESIDUES]
        for signed in _both_signs(part.strip(" ()"))
        if part.strip()
    }
    return Clause("".join(left.split()).strip("{}()"), frozenset(residues), modulus)


def _both_signs(residue: str) -> tuple[str, ...]:
    for sign in (r"\pm", "\u00b1"):
        if residue.startswith(sign):
            rest = residue.removeprefix(sign).strip()
            return rest, f"-{rest}"
    return (residue,)


def _whole(text: str) -> str:
    text = "".join(text.split())
    return str(abs(int(text))) if _WHOLE.fullmatch(text) else text


def _reduced(residue: str, modulus: str) -> str:
    residue = "".join(residue.split())
    if _WHOLE.fullmatch(residue) and modulus.isdigit():
        return str(int(residue) % int(modulus))
    return residue


def equal_congruences(truth: str, answer: str, equal: Callable[[str, str], bool]) -> bool | None:
    """Compare two answers if at least one has a modulus; None if neither has.

    `equal` compares the parts of the answers that are not congruences.
    """
    ours, theirs = congruences(truth), congruences(answer)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        return _equal_one_sided(truth, answer, ours, theirs)
    if len(ours.others) != len(theirs.others) or not all(map(equal, ours.others, theirs.others)):
        return False
    moduli = {clause.modulus for clause in ours.clauses | theirs.clauses}
    if (len(moduli) > 1 or ours.others) and _joined_otherwise(truth, answer):
        return False
    lefts = {clause.left for clause in ours.clauses | theirs.clauses} - {""}
    if len(lefts) <= 1:
        expected, found = _union(ours.clauses), _union(theirs.clauses)
        if expected is not None and found is not None:
            return expected == found
        return {(each.residues, each.modulus) for each in ours.clauses} == {
            (each.residues, each.modulus) for each in theirs.clauses
        }
    return ours.clauses == theirs.clauses


def _joined_otherwise(truth: str, answer: str) -> bool:
    """Return whether one joins its clauses by "and" and the other by "or".

    For residues of one modulus both words list solutions: x is 1 and 3, or 1 or 3, modulo 4.
    """
    kinds = [{kind for kind, form in _CONJUNCTIONS.items() if re.search(form, text)} for text in (truth, answer)]
    return all(kinds) and not kinds[0] & kinds[1]


def _union(clauses: frozenset[Clause]) -> tuple[int, frozenset[int]] | None:
    """Return all residues for the one modulus, reduced to their smallest period; None for several or no numbers."""
    moduli = {clause.modulus for clause in clauses}
    residues = frozenset().union(*(clause.residues for clause in clauses))
    if len(moduli) != 1 or not all(text.isdigit() for text in moduli | residues):
        return None
    modulus = int(next(iter(moduli)))
    found = frozenset(map(int, residues))
    if modulus <= _LONGEST_PERIOD:
        for period in range(1, modulus):
            if modulus % period == 0 and frozenset((each + period) % modulus for each in found) == found:
                return period, frozenset(each % period for each in found)
    return modulus, found


def _equal_one_sided(truth: str, answer: str, ours: Congruences | None, theirs: Congruences | None) -> bool:
    """Compare a congruence with ``7k+3`` or with a number: 3 equals ``3 \\pmod 7``, but no congruence of a variable."""
    found, other = (ours, answer) if ours else (theirs, truth)
    if found is None or found.others or len(found.clauses) != 1:
        return False
    (clause,) = found.clauses
    match = _LINEAR.fullmatch(other)
    if match is not None and clause.modulus.isdigit():
        factor = match["factor0"] or match["factor1"]
        rest = (match["first"] or match["last"] or "0").replace(" ", "")
        same_left = clause.left in ("", match["name"]) or match["name"] is None
        return same_left and _whole(factor) == clause.modulus and clause.residues == {_reduced(rest, factor)}
    return ours is None and not clause.left and clause.residues == {other}
