"""Extract what the document of every aclnn operator demands of its arguments, and which chips have it.

    python extract_rules.py RELEASE... --calls *_calls*.txt > documented_rules.txt

RELEASE is a folder with checkouts of CANN's operators (ops-math, ops-nn, ops-transformer) at one release, which have a
document ``docs/aclnnX.md`` beside each operator. One line for every operator that is called: its name, then its
parameters in the order of the C function as ``name:type``, each followed by what is demanded of it:

    aclnnSilu self:Tensor|BFLOAT16,FLOAT,FLOAT16|0-8|required out:Tensor|BFLOAT16,FLOAT,FLOAT16|0-8|required
    aclnnMatmulAllReduce|A2 x1:Tensor|BFLOAT16,FLOAT16|2-3|required ... reduceOp:char*=sum commTurn:int64=0 ...

After the type of a tensor are element types, ranks (``0-8`` or ``1,3``), and words: ``required`` (not a null pointer),
``contiguous`` (in order in memory), and how it goes together with others, such as ``shape=self``
(`documented_relations`). An empty part demands nothing. After that of a number or a string are the values that it may
have: ``0,2``, ``1..65535``, ``0..``, ``BSH,TND``; of a bool ``0`` or ``1``. After the operator's name is the one family
of chips that has it, where the other has not.

Documents have mistakes, and newer kernels take more: of several releases, what one allows is allowed. A chip lacks an
operator where its document's table of products says so in every release, and the sources beside it register kernels
for the other family alone: the tables exclude operators from chips that they run on (aclnnForeachCopy on A3).

Left out is what is demanded of single dimensions or under a condition; and types of scalars, which torch_npu gives as
they come from Python (DOUBLE or INT64) and kernels convert.
"""

import argparse
import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

from documented_relations import KINDS, known, of_parameter, of_refusals, renamed_in, weaker

# Names of element types in the documents, as torch_npu's headers name them.
ELEMENT_TYPES = {
    **{name: name for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "BOOL", "INT4", "HIFLOAT8", "COMPLEX32")},
    **{name: name for name in ("COMPLEX64", "COMPLEX128", "FLOAT8_E5M2", "FLOAT8_E4M3FN", "FLOAT8_E8M0", "STRING")},
    **{name: name for name in ("FLOAT4_E2M1", "FLOAT4_E1M2")},
    **{f"{sign}INT{bits}": f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    "FLOAT32": "FLOAT",
    "FLOAT64": "DOUBLE",
    "BF16": "BFLOAT16",
}
PARAMETER_TYPES = {
    "aclTensor*": "Tensor",
    "aclTensorList*": "TensorList",
    "aclScalar*": "Scalar",
    "aclScalarList*": "ScalarList",
    "aclIntArray*": "IntArray",
    "aclFloatArray*": "FloatArray",
    "aclBoolArray*": "BoolArray",
    "aclDataType": "DataType",
    "char*": "char*",
    **{f"{name}_t": name for name in ("int64", "uint64", "int32", "uint32", "int16", "int8", "uint8")},
    **{name: name for name in ("bool", "double", "float")},
    "int": "int32",
}
_LIST = r"[A-Z][A-Z0-9_]*(?:\s*[、，,和或/]\s*[A-Z][A-Z0-9_]*)*"
_DTYPES_IN_WORDS = re.compile(rf"数据类型(?:仅)?(?:支持|为|是)\s*({_LIST})")
_PROTOTYPE = re.compile(r"aclnnStatus\s+(aclnn\w+)GetWorkspaceSize\s*\(([^)]*)\)")
_ITEM = re.compile(r"^ *[-*] +`?(?P<name>\w+)`?\s*[(（]", re.M)
# Values in words. A list ends where a unit, a fraction or a word that it is part of would go on.
_NUMBERS = r"(-?\d+(?:\s*[、,，/|和或]\s*-?\d+){least})(?![0-9A-Za-z_.%~*-]|的|维|位|倍|个)"
_ONLY = r"(?:仅|只)(?:支持|能)(?:传入?|输入|取值?|配置值?|枚举值)*(?:等于|为)?\s*"
_ONLY_NUMBERS = re.compile(_ONLY + _NUMBERS.replace("least", "0,"))
_LISTED_NUMBERS = re.compile(r"取值(?:范围)?(?:为|是|支持|：|:)?\s*" + _NUMBERS.replace("least", "1,"))
_RESERVED = re.compile(r"不支持，传入?(0)即可")
_INTERVAL = re.compile(r"(?:范围|取值)\D{0,6}([\[(])\s*(-?\d+)\s*[,，]\s*(-?\d+)\s*([\])])")
_FROM_TO = re.compile(r"取值范围为?(\d+)-(\d+)(?!\w)")
_AT_LEAST = re.compile(r"(?:范围|取值|需|满足)\w{0,8}?(大于等于|不小于|大于)\s*0(?![\w.])")
_ONLY_BOOL = re.compile(_ONLY + r"([Tt]rue|[Ff]alse)(?!\s*[或和、])")
_WORD = r"[\"“`]?(?!Host)[A-Za-z]\w*(?![\w*])[\"”`]?"
_ONLY_WORDS, _LISTED_WORDS = (
    re.compile(begin + rf"({_WORD}(?:\s*[、，/和或]\s*{_WORD})*)(?!类型)", re.A)
    for begin in (_ONLY, r"(?:支持(?:取值)?|可选值)为?\s*")
)
# A sentence with one of these states a condition, or a case that is not rejected.
_CONDITIONAL = re.compile(r"时|当|若|如果|场景|模式下|^在|建议|例如|不生效|类型(?:仅|只)?支持")
# Families of chips: the start of their names in the tables of products, and their names in the sources of kernels.
CHIPS = {"A2": ("Atlas A2", "ascend910b"), "A3": ("Atlas A3", "ascend910_93")}


@dataclass(frozen=True)
class Values:
    """The allowed values of a number or a string: those listed, or the integers from `least` to `most`."""

    listed: frozenset[str] = frozenset()
    least: int | None = None
    most: int | None = None

    def or_else(self, other: "Values") -> "Values":
        """Return values that contain everything that either allows."""
        if self.listed and other.listed:
            return Values(self.listed | other.listed)
        lows, highs = zip(*(each.bounds() for each in (self, other)), strict=True)
        return Values(
            least=None if None in lows else min(low for low in lows if low is not None),
            most=None if None in highs else max(high for high in highs if high is not None),
        )

    def bounds(self) -> tuple[int | None, int | None]:
        """Return the least and the greatest number that is allowed."""
        numbers = [int(each) for each in self.listed]
        return (min(numbers), max(numbers)) if numbers else (self.least, self.most)

    def __str__(self) -> str:
        if self.listed:
            numbers = all(re.fullmatch(r"-?\d+", each) for each in self.listed)
            return ",".join(sorted(self.listed, key=int if numbers else str))
        return f"{'' if self.least is None else self.least}..{'' if self.most is None else self.most}"


@dataclass(frozen=True)
class Demand:
    """A document's demands on one parameter; None or False if it says nothing."""

    dtypes: frozenset[str] | None = None
    ranks: frozenset[int] | None = None
    required: bool = False
    contiguous: bool = False
    values: Values | None = None
    relations: frozenset[tuple[str, str]] = frozenset()

    def or_else(self, other: "Demand") -> "Demand":
        """Return the demands if either document may be right."""
        return Demand(
            self.dtypes | other.dtypes if self.dtypes and other.dtypes else self.dtypes or other.dtypes,
            self.ranks | other.ranks if self.ranks and other.ranks else self.ranks or other.ranks,
            self.required and other.required,
            self.contiguous and other.contiguous,
            self.values.or_else(other.values) if self.values and other.values else self.values or other.values,
            weaker(self.relations, other.relations),
        )

    def __str__(self) -> str:
        if self.values:
            return f"={self.values}"
        words = [word for word in ("required", "contiguous") if getattr(self, word)]
        words += [
            f"{kind}={names}" for kind, names in sorted(self.relations, key=lambda each: (KINDS.index(each[0]), each))
        ]
        parts = [",".join(sorted(self.dtypes or ())), _written_ranks(self.ranks), ",".join(words)]
        return "|".join(["", *parts]).rstrip("|")


def _written_ranks(ranks: frozenset[int] | None) -> str:
    if not ranks:
        return ""
    if len(ranks) > 1 and len(ranks) == max(ranks) - min(ranks) + 1:
        return f"{min(ranks)}-{max(ranks)}"
    return ",".join(map(str, sorted(ranks)))


class _Table(HTMLParser):
    """The rows of the first table of a text, as lists of cells; a cell that spans several rows is in each of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._open, self._ended = False, False
        self._spans: dict[int, tuple[int, str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if self._ended:
            return
        if tag == "tr":
            self.rows.append([])
            self._carry_over()
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
            self._open, self._rows = True, int(dict(attributes).get("rowspan") or 1)
        elif tag in ("br", "li", "p") and self._open:
            self.rows[-1][-1] += "\n"

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._ended = True
        elif tag in ("td", "th") and self._open:
            self._open = False
            if self._rows > 1:
                self._spans[len(self.rows[-1]) - 1] = (self._rows - 1, self.rows[-1][-1])
            self._carry_over()

    def handle_data(self, data: str) -> None:
        if self._open and not self._ended:
            self.rows[-1][-1] += data

    def _carry_over(self) -> None:
        row = self.rows[-1]
        while len(row) in self._spans:
            left, text = self._spans.pop(len(row))
            if left > 1:
                self._spans[len(row)] = (left - 1, text)
            row.append(text)


def for_chip(text: str, chip: str) -> str:
    """Return the lines of a text that apply to a chip.

    These are the lines that name it if one of them has a list, otherwise the lines that name no chip.
    """
    lines = text.splitlines()
    named = [line for line in lines if chip in line]
    common = [line for line in lines if not re.search(r"Ascend 9\d\d|Atlas|Kirin", line)]
    return "\n".join(named or common) if any(re.search(_LIST, line) for line in named) else "\n".join(common)


def element_types(words: str) -> frozenset[str] | None:
    """Return the element types of a list; None if it names none, or one that is not known."""
    words = re.sub(r"[（(][^）)]*[）)]", "", words).strip(" 。；;\n")
    names = [word for word in re.split(r"[、，,/和或\s]+", words) if word]
    if not names or any(name not in ELEMENT_TYPES for name in names):
        return None
    return frozenset(ELEMENT_TYPES[name] for name in names)


def _from_to(least: int, most: int) -> frozenset[int]:
    """Return the numbers of dimensions that a range allows.

    Documents say "1-8" of many operators that take scalars too: their sources check the upper limit alone. So it
    includes 0.
    """
    return frozenset(range(0 if (least, most) == (1, 8) else least, most + 1))


def ranks(text: str) -> frozenset[int] | None:
    """Return the numbers of dimensions that a table's cell allows; None if it gives no numbers."""
    text = text.strip(" 。维\n")
    if match := re.fullmatch(r"(\d)\s*维?[-~到至]\s*(\d)(?:维.*)?", text):
        return _from_to(int(match[1]), int(match[2]))
    if re.fullmatch(r"\d(、\d)*", text):
        return frozenset(map(int, text.split("、")))
    if match := re.fullmatch(r"不(?:超过|高于|大于|支持)\s*(\d)(?:维以上)?", text):
        return frozenset(range(int(match[1]) + 1))
    return None


def ranks_in_words(text: str) -> frozenset[int] | None:
    """Return the numbers of dimensions that a sentence allows."""
    if match := re.search(r"shape(?:维度)?(?:只|仅)?支持\s*(\d)\s*维?[-~到至](\d)\s*维", text):
        return _from_to(int(match[1]), int(match[2]))
    if match := re.search(r"维度?(?:不支持(\d)维以上|不(?:高于|超过|大于)(\d)维?)", text):
        return frozenset(range(int(match[1] or match[2]) + 1))
    if match := re.search(r"要求为(?:一个)?(\d)D\s*(?:的)?Tensor", text):
        return frozenset({int(match[1])})
    return None


def allowed_values(kind: str, text: str) -> Values | None:
    """Read the allowed values of a number, a bool (0 or 1) or a string from its description; None if it gives none.

    Conditional sentences and remarks in parentheses are left out.
    """
    text = re.sub(r"[（(][^（）()\[\]]*[）)]", "", re.sub(r"当前版本|当前|目前", "", text))
    sentences = [each for each in map(str.strip, re.split(r"[。；;\n]", text)) if not _CONDITIONAL.search(each)]

    def first(*patterns: re.Pattern[str]) -> re.Match[str] | None:
        return next((found for each in patterns for one in sentences if (found := each.search(one))), None)

    if kind == "bool":
        return Values(frozenset("1" if found[1].lower() == "true" else "0")) if (found := first(_ONLY_BOOL)) else None
    if kind == "char*":
        words = re.findall(r"[A-Za-z]\w*", found[1], re.A) if (found := first(_ONLY_WORDS, _LISTED_WORDS)) else []
        return Values(frozenset(words)) if words else None
    if "int" not in kind:
        return None
    if found := first(_ONLY_NUMBERS, _RESERVED, _LISTED_NUMBERS):
        return Values(frozenset(re.findall(r"-?\d+", found[1])))
    if found := first(_INTERVAL):
        return Values(least=int(found[2]) + (found[1] == "("), most=int(found[3]) - (found[4] == ")"))
    if found := first(_FROM_TO):
        return Values(least=int(found[1]), most=int(found[2]))
    if found := first(_AT_LEAST):
        return Values(least=int(found[1] == "大于"))
    return None


def from_table(section: str, chip: str, kinds: Mapping[str, str]) -> Iterator[tuple[str, Demand]]:
    """Yield the demands of a document with a table of parameters, whose types are `kinds`."""
    head, *rows = _Table(section).rows
    columns = {re.sub(r"[(（].*|张量", "", cell).strip().lower(): at for at, cell in enumerate(head)}
    dtypes, shapes = columns.get("数据类型"), columns.get("维度")
    strides = columns.get("非连续tensor", columns.get("非连续"))

    def cell(row: list[str], column: int | None) -> str:
        return html.unescape(row[column]) if column is not None and column < len(row) else ""

    for row in rows:
        described = cell(row, columns.get("描述")) + "\n" + cell(row, columns.get("使用说明"))
        name = re.sub(r"[(（].*", "", cell(row, 0), flags=re.S).strip("` \n")
        yield (
            name,
            Demand(
                element_types(for_chip(re.sub(r"^.*?</term>：", "", cell(row, dtypes)), chip)),
                ranks(for_chip(cell(row, shapes), chip)) or ranks_in_words(described),
                contiguous=cell(row, strides).strip() in ("×", "x"),
                values=allowed_values(kinds.get(name, ""), for_chip(described, chip)),
                relations=frozenset(
                    of_parameter(for_chip(described, chip))
                    | of_parameter(for_chip(cell(row, shapes), chip), "shape")
                    | of_parameter(for_chip(cell(row, dtypes), chip), "dtype")
                ),
            ),
        )


def from_list(section: str, chip: str, kinds: Mapping[str, str]) -> Iterator[tuple[str, Demand]]:
    """Yield the demands of a document with a list of parameters, whose types are `kinds`."""
    ends = [match.start() for match in _ITEM.finditer(section)][1:] + [len(section)]
    for match, end in zip(_ITEM.finditer(section), ends, strict=False):
        text = section[match.start() : end]
        lists = [element_types(each) for each in _DTYPES_IN_WORDS.findall(for_chip(text, chip))]
        dtypes = None if not lists or None in lists else frozenset().union(*(each for each in lists if each))
        values = allowed_values(kinds.get(match["name"], ""), for_chip(text, chip))
        relations = frozenset(of_parameter(for_chip(text, chip).partition("：")[2]))
        yield match["name"], Demand(dtypes, ranks_in_words(text), values=values, relations=relations)


def required_names(section: str) -> set[str]:
    """Return the parameters for which a document rejects a null pointer."""
    found = re.search(r"161001.*?(?=161002|561\d{3}|$)", section, re.S)
    text = re.split(r"或者|同时|均为|全为|都为", re.sub(r"<[^>]+>", " ", found[0]))[0] if found else ""
    return set(re.findall(r"[A-Za-z][A-Za-z0-9_]*", text))


def parameters(prototype: str) -> list[tuple[str, str]] | None:
    """Return names and types of a C function's parameters but the last two; None if a type is not known."""
    words = [re.sub(r"\bconst\b", "", word).strip() for word in prototype.split(",")]
    split = [re.fullmatch(r"(\w+)\s*((?:\s*\*)*)\s*(\w+)", word) for word in words]
    if not all(split):
        return None
    named = [(match[3], match[1] + match[2].replace(" ", "")) for match in split if match]
    if [kind for _, kind in named[-2:]] != ["uint64_t*", "aclOpExecutor**"]:
        return None
    if any(kind not in PARAMETER_TYPES for _, kind in named[:-2]):
        return None
    return [(name, PARAMETER_TYPES[kind]) for name, kind in named[:-2]]


@dataclass(frozen=True)
class Operator:
    """An operator: its parameters in order, with names, types and demands, and the chips that have it."""

    names: tuple[str, ...]
    types: tuple[str, ...]
    demands: tuple[Demand, ...]
    chips: frozenset[str] = frozenset(CHIPS)

    def or_else(self, other: "Operator") -> "Operator":
        """Return the demands if either document may be right; this operator itself if their parameters differ."""
        if self.types != other.types:
            return self
        renamed = dict(zip(other.names, self.names, strict=True))
        demands = tuple(
            ours.or_else(replace(theirs, relations=renamed_in(theirs.relations, renamed)))
            for ours, theirs in zip(self.demands, other.demands, strict=True)
        )
        return Operator(self.names, self.types, demands, self.chips | other.chips)

    def __str__(self) -> str:
        parts = zip(self.names, self.types, self.demands, strict=True)
        chips = "" if self.chips == CHIPS.keys() else "|" + ",".join(sorted(self.chips))
        return " ".join([chips, *(f"{name}:{kind}{demand}" for name, kind, demand in parts)])


def chips_with(document: str, kernels: str) -> frozenset[str]:
    """Return the chips that have a document's operators, by its table of products and the sources of its kernels."""
    have_kernels = {chip for chip, (_, name) in CHIPS.items() if f'AddConfig("{name}"' in kernels}

    def is_refused(product: str) -> bool:
        rows = re.findall(rf"^\|[^|\n]*{product}[^|\n]*\|\s*(\S+)\s*\|", document, re.M)
        return bool(rows) and "√" not in rows

    lacking = {chip for chip, (product, _) in CHIPS.items() if is_refused(product) and chip not in have_kernels}
    return frozenset(CHIPS) - (lacking if have_kernels else set())


def operators_of(document: str, chip: str, kernels: str = "") -> Iterator[tuple[str, Operator]]:
    """Yield the operators of one document, by name; `kernels` is the text that registers their kernels."""
    for operator, prototype in dict(_PROTOTYPE.findall(document)).items():
        named = parameters(prototype)
        begin = re.search(rf"^#+ +`?{operator}GetWorkspaceSize`?\s*$", document, re.M)
        if named is None or begin is None:
            continue
        kinds = dict(named)
        section = document[begin.end() :]
        if end := re.search(rf"^#+ +`?{operator}`?\s*$", section, re.M):
            section = section[: end.start()]
        yield (
            operator,
            Operator(
                tuple(kinds),
                tuple(kinds.values()),
                tuple(_demands(section, chip, kinds)),
                chips_with(document, kernels),
            ),
        )


def _demands(section: str, chip: str, kinds: Mapping[str, str]) -> Iterator[Demand]:
    """Yield a section's demands on each parameter in turn, limited to those that its type can meet or violate."""
    described, _, results = section.partition("返回值")
    found = dict((from_table if "<table" in described else from_list)(described, chip, kinds))
    required, refused = required_names(results), list(of_refusals(for_chip(results, chip)))
    for name, kind in kinds.items():
        said = found.get(name, Demand())
        if kind not in ("Tensor", "TensorList"):
            yield Demand(values=said.values)
            continue
        also = {(relation, names) for parameter, relation, names in refused if parameter == name}
        relations = known(name, said.relations | also, kinds)
        yield Demand(said.dtypes, said.ranks, name in required, said.contiguous, relations=relations)


def extract(releases: list[Path], chip: str) -> dict[str, Operator]:
    """Return all operators. If a release has two documents of one operator, the one that is not experimental counts."""
    found: dict[str, Operator] = {}
    for release in releases:
        own: dict[str, Operator] = {}
        documents = sorted(release.rglob("docs/aclnn*.md"), key=lambda path: ("experimental" in path.parts, path))
        for path in documents:
            sources = sorted(path.parents[1].rglob("*_def.cpp"))
            kernels = "".join(source.read_text(errors="replace") for source in sources)
            for name, operator in operators_of(path.read_text(errors="replace"), chip, kernels):
                own.setdefault(name, operator)
        for name, operator in own.items():
            found[name] = found[name].or_else(operator) if name in found else operator
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", type=Path, nargs="+")
    parser.add_argument("--calls", type=Path, nargs="+", required=True, help="output of extract_calls.py")
    parser.add_argument("--chip", default="A3", choices=CHIPS, help="the family of chips whose rules are extracted")
    given = parser.parse_args()
    called = {line.split(" ", 1)[0] for calls in given.calls for line in calls.read_text().splitlines()}
    found = extract(given.releases, CHIPS[given.chip][0])
    print("\n".join(f"{name}{found[name]}" for name in sorted(called & set(found))))


if __name__ == "__main__":
    main()
