"""Relations between two tensors in an aclnn operator's document: their shapes or element types agree.

A relation is written as ``kind=names`` and belongs to one parameter:

    shape=self               the same shape as `self`
    broadcasts=self          a shape that fits to that of `self` by broadcasting
    broadcast_of=self+other  the shape that `self` and `other` have after broadcasting
    dtype=self               the same element type as `self`

Only clauses that say this and nothing else are read. Clauses with a condition, about single dimensions, or with names
that are not parameters are left out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

SHAPE_KINDS = ("shape", "broadcasts", "broadcast_of")
KINDS = (*SHAPE_KINDS, "dtype")

_CONDITION = re.compile(r"时|当|若|如果|场景|模式下|^在|建议|例如|可选|存在|除|其余|其他|非空|不传")
_NAME = r"[A-Za-z][A-Za-z0-9_]*"
_NAMES = rf"(?P<names>{_NAME}(?:[、和与及]{_NAME})*)"
_ASPECT = r"(?:数据类型|数据格式|shape|形状)"
_ASPECTS = rf"{_ASPECT}(?:[、和与及]|以及)?(?:{_ASPECT}(?:[、和与及]|以及)?)*"
_MUST = r"(?:均|都)?(?:需要|需|要求|要|必须|应该|应|可以)?(?:均|都)?"
_ROLE = r"(?:计算)?(?:输入|输出|入参|出参|参数)?的?"
_SAME = r"(?:保持)?(?:一致|相同|相等|一样)"
_DIFFER = r"(?:不一致|不相同|不同|不相等|不一样)"
_BROADCAST = r"broadcast(?:推导)?(?:关系|规则)?"
_OF = "[的 ]?"
_AFTER = r" ?(?:做|进行|经过)?(?:broadcast|广播)(?:以|之)?后的(?:tensor的)?shape"

_AGREES = re.compile(
    rf"(?:且|其|输出的?|输入的?)?(?P<aspects>{_ASPECTS}){_MUST}[与和同]{_ROLE}{_NAMES}{_OF}(?:{_ASPECTS})?{_SAME}"
)
_AGREE = re.compile(rf"(?:参数)?{_NAMES}{_OF}(?P<aspects>{_ASPECTS}){_MUST}{_SAME}")
_AGREES_IN = re.compile(rf"且?{_MUST}与{_ROLE}{_NAMES}{_OF}(?P<aspects>{_ASPECTS}){_MUST}{_SAME}")
_OF_A_COLUMN = re.compile(rf"[与和同]{_ROLE}{_NAMES}{_SAME}")
_FITS = re.compile(rf"且?shape{_MUST}[与和]{_ROLE}{_NAMES}(?:的shape)?(?:满足{_BROADCAST}|进行broadcast)")
_FIT = re.compile(rf"且?{_NAMES}的shape{_MUST}满足{_BROADCAST}")
_FITS_INTO = re.compile(rf"shape可以broadcast到{_NAMES}的shape")
_RESULT = re.compile(rf"且?(?:shape{_MUST}|{_NAME})(?:是|为|[与和]){_NAMES}{_AFTER}(?:{_SAME})?")

_REFUSED_PAIR = re.compile(rf"(?:参数|输入)?{_NAMES}的(?P<aspects>{_ASPECTS}){_DIFFER}")
_REFUSED_FIT = re.compile(rf"(?:参数|输入)?{_NAMES}的shape(?:(?:无法|不能)(?:做|进行)?{_BROADCAST}|不满足{_BROADCAST})")
_REFUSED_RESULT = re.compile(rf"(?P<result>{_NAME})的shape(?:不是|不等于|[与和]){_NAMES}{_AFTER}(?:{_DIFFER})?")


def clauses(text: str, ends: str = "。；;\n") -> Iterator[str]:
    """Yield the clauses of unconditional sentences, without markup, remarks in parentheses, and superfluous spaces."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[（(][^（）()]*[）)]", "", text)
    for sentence in re.split(f"[{ends}]", text):
        sentence = re.sub(r"(?<![A-Za-z0-9_])\s+|\s+(?![A-Za-z0-9_])", "", re.sub(r"[`$“”\"*]", "", sentence))
        if not _CONDITION.search(sentence):
            yield from re.split(r"[，,]", sentence)


def _split(names: str) -> list[str]:
    return re.split(r"[、和与及]", names)


def _kinds(aspects: str) -> list[str]:
    return [kind for kind, words in (("shape", "shape|形状"), ("dtype", "数据类型")) if re.search(words, aspects)]


def of_parameter(text: str, column: str = "") -> set[tuple[str, str]]:
    """Return the relations (kind, names) in one parameter's description; `column` is the kind of its table column."""
    found: set[tuple[str, str]] = set()
    for clause in clauses(text):
        if result := _RESULT.fullmatch(clause):
            found.add(("broadcast_of", "+".join(_split(result["names"]))))
        elif fits := _FITS.fullmatch(clause) or _FIT.fullmatch(clause) or _FITS_INTO.fullmatch(clause):
            found |= {("broadcasts", name) for name in _split(fits["names"])}
        elif agrees := _AGREES.fullmatch(clause) or _AGREES_IN.fullmatch(clause) or _AGREE.fullmatch(clause):
            found |= {(kind, name) for kind in _kinds(agrees["aspects"]) for name in _split(agrees["names"])}
        elif column and (same := _OF_A_COLUMN.fullmatch(clause)):
            found |= {(column, name) for name in _split(same["names"])}
    return found


def of_refusals(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (parameter, kind, names) from a list of rejected calls; the last parameter named is the one concerned."""
    for clause in clauses(text, r"。；;\n<>|"):
        clause = re.sub(r"^\d+\.", "", clause)
        if result := _REFUSED_RESULT.fullmatch(clause):
            yield result["result"], "broadcast_of", "+".join(_split(result["names"]))
            continue
        refused = _REFUSED_FIT.fullmatch(clause) or _REFUSED_PAIR.fullmatch(clause)
        if refused:
            *others, last = _split(refused["names"])
            kinds = ["broadcasts"] if "broadcast" in clause else _kinds(refused["aspects"])
            yield from ((last, kind, other) for kind in kinds for other in others)


def known(name: str, relations: Iterable[tuple[str, str]], kinds: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Keep the relations between parameters of one type; `kinds` are the types of the operator's parameters.

    If a document says of two shapes both that they are equal and that they broadcast, the latter counts.
    """
    found = {
        (kind, names)
        for kind, names in relations
        if all(kinds.get(each) == kinds[name] and each != name for each in names.split("+"))
    }
    broadcast = {each for kind, names in found if kind in SHAPE_KINDS[1:] for each in names.split("+")}
    return frozenset(found - {("shape", each) for each in broadcast})


def renamed_in(relations: Iterable[tuple[str, str]], names_of: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return the same relations under other names of the parameters."""
    return frozenset((kind, "+".join(names_of[name] for name in names.split("+"))) for kind, names in relations)


def weaker(ours: frozenset[tuple[str, str]], theirs: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """Return the relations to demand if either of two documents may be right; if one has none, the other's."""
    return frozenset(_weaker(ours, theirs, SHAPE_KINDS)) | frozenset(_weaker(ours, theirs, ("dtype",)))


def _weaker(
    ours: Iterable[tuple[str, str]], theirs: Iterable[tuple[str, str]], group: tuple[str, ...]
) -> set[tuple[str, str]]:
    own, other = ({each for each in all_of_it if each[0] in group} for all_of_it in (ours, theirs))
    if not own or not other:
        return own | other
    fit = {each for each in own ^ other if each[0] == "broadcasts"}
    return own & other | {each for each in fit if _in_both(each[1], own, other)}


def _in_both(name: str, ours: Iterable[tuple[str, str]], theirs: Iterable[tuple[str, str]]) -> bool:
    return all(any(name in names.split("+") for _, names in each) for each in (ours, theirs))
