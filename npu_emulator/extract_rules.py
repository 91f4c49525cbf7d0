"""Extract what the document of every aclnn operator demands of its arguments: element types, ranks, null, strides.

    python extract_rules.py --calls op_plugin_calls.txt RELEASE... > documented_rules.txt

RELEASE is a folder with checkouts of CANN's operators (ops-math, ops-nn, ops-transformer) at one release, which have a
document ``docs/aclnnX.md`` beside each operator. One line for every operator that is called: its name, then its
parameters in the order of the C function as ``name:type``, each followed by what is demanded of it:

    aclnnSilu self:Tensor|BFLOAT16,FLOAT,FLOAT16|0-8|required out:Tensor|BFLOAT16,FLOAT,FLOAT16|0-8|required

The parts after the type are element types, ranks (``0-8`` or ``1,3``), and words: ``required`` (not a null pointer) and
``contiguous`` (in order in memory). An empty part demands nothing.

Documents have mistakes, and newer kernels take more: of several releases, what one allows is allowed. Left out is
what is said in words alone, such as that two shapes agree; types of scalars, which torch_npu gives as they come from
Python (DOUBLE or INT64) and kernels convert; and the tables of products, which exclude operators from a chip that the
text below speaks of (aclnnSwiGlu on A3 at 8.5.0).
"""

import argparse
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

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


@dataclass(frozen=True)
class Demand:
    """What a document demands of one parameter; None and False where it says nothing."""

    dtypes: frozenset[str] | None = None
    ranks: frozenset[int] | None = None
    required: bool = False
    contiguous: bool = False

    def or_else(self, other: "Demand") -> "Demand":
        """What is demanded where either may be right."""
        return Demand(
            self.dtypes | other.dtypes if self.dtypes and other.dtypes else self.dtypes or other.dtypes,
            self.ranks | other.ranks if self.ranks and other.ranks else self.ranks or other.ranks,
            self.required and other.required,
            self.contiguous and other.contiguous,
        )

    def __str__(self) -> str:
        words = [word for word in ("required", "contiguous") if getattr(self, word)]
        parts = [",".join(sorted(self.dtypes or ())), _written_ranks(self.ranks), ",".join(words)]
        return "|".join(["", *parts]).rstrip("|")


def _written_ranks(ranks: frozenset[int] | None) -> str:
    if not ranks:
        return ""
    if len(ranks) > 1 and len(ranks) == max(ranks) - min(ranks) + 1:
        return f"{min(ranks)}-{max(ranks)}"
    return ",".join(map(str, sorted(ranks)))


class _Table(HTMLParser):
    """The rows of the first table of a text, as lists of cells; a cell over several rows stands in each of them."""

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
    """The lines of a text that hold for a chip: those that name it if there are any that do, and those of all chips."""
    lines = text.splitlines()
    named = [line for line in lines if chip in line]
    common = [line for line in lines if not re.search(r"Ascend 9\d\d|Atlas|Kirin", line)]
    return "\n".join(named or common) if any(re.search(_LIST, line) for line in named) else "\n".join(common)


def element_types(words: str) -> frozenset[str] | None:
    """The element types of a list; None where it names one that is not known, or none."""
    words = re.sub(r"[（(][^）)]*[）)]", "", words).strip(" 。；;\n")
    names = [word for word in re.split(r"[、，,/和或\s]+", words) if word]
    if not names or any(name not in ELEMENT_TYPES for name in names):
        return None
    return frozenset(ELEMENT_TYPES[name] for name in names)


def ranks(text: str) -> frozenset[int] | None:
    """The numbers of dimensions that a table's cell allows; None where it gives no numbers."""
    text = text.strip(" 。维\n")
    if match := re.fullmatch(r"(\d)\s*维?[-~到至]\s*(\d)(?:维.*)?", text):
        return frozenset(range(int(match[1]), int(match[2]) + 1))
    if re.fullmatch(r"\d(、\d)*", text):
        return frozenset(map(int, text.split("、")))
    if match := re.fullmatch(r"不(?:超过|高于|大于|支持)\s*(\d)(?:维以上)?", text):
        return frozenset(range(int(match[1]) + 1))
    return None


def ranks_in_words(text: str) -> frozenset[int] | None:
    """The numbers of dimensions that a sentence allows."""
    if match := re.search(r"shape(?:维度)?(?:只|仅)?支持\s*(\d)\s*维?[-~到至](\d)\s*维", text):
        return frozenset(range(int(match[1]), int(match[2]) + 1))
    if match := re.search(r"维度?(?:不支持(\d)维以上|不(?:高于|超过|大于)(\d)维?)", text):
        return frozenset(range(int(match[1] or match[2]) + 1))
    if match := re.search(r"要求为(?:一个)?(\d)D\s*(?:的)?Tensor", text):
        return frozenset({int(match[1])})
    return None


def from_table(section: str, chip: str) -> Iterator[tuple[str, Demand]]:
    """The demands of a document that has a table of parameters."""
    head, *rows = _Table(section).rows
    columns = {re.sub(r"[(（].*|张量", "", cell).strip().lower(): at for at, cell in enumerate(head)}
    kinds, shapes = columns.get("数据类型"), columns.get("维度")
    strides = columns.get("非连续tensor", columns.get("非连续"))

    def cell(row: list[str], column: int | None) -> str:
        return html.unescape(row[column]) if column is not None and column < len(row) else ""

    for row in rows:
        described = cell(row, columns.get("描述")) + cell(row, columns.get("使用说明"))
        yield (
            cell(row, 0).strip("` \n"),
            Demand(
                element_types(for_chip(re.sub(r"^.*?</term>：", "", cell(row, kinds)), chip)),
                ranks(for_chip(cell(row, shapes), chip)) or ranks_in_words(described),
                contiguous=cell(row, strides).strip() in ("×", "x"),
            ),
        )


def from_list(section: str, chip: str) -> Iterator[tuple[str, Demand]]:
    """The demands of a document that has a list of parameters."""
    ends = [match.start() for match in _ITEM.finditer(section)][1:] + [len(section)]
    for match, end in zip(_ITEM.finditer(section), ends, strict=False):
        text = section[match.start() : end]
        lists = [element_types(each) for each in _DTYPES_IN_WORDS.findall(for_chip(text, chip))]
        kinds = None if not lists or None in lists else frozenset().union(*(each for each in lists if each))
        yield match["name"], Demand(kinds, ranks_in_words(text))


def required_names(section: str) -> set[str]:
    """The parameters of which a document says that a null pointer is refused."""
    found = re.search(r"161001.*?(?=161002|561\d{3}|$)", section, re.S)
    text = re.split(r"或者|同时|均为|全为|都为", re.sub(r"<[^>]+>", " ", found[0]))[0] if found else ""
    return set(re.findall(r"[A-Za-z][A-Za-z0-9_]*", text))


def parameters(prototype: str) -> list[tuple[str, str]] | None:
    """Names and types of a C function's parameters but the last two; None where a type is not known."""
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
    """The parameters of an operator, in order: names, types, and what is demanded of each."""

    names: tuple[str, ...]
    types: tuple[str, ...]
    demands: tuple[Demand, ...]

    def or_else(self, other: "Operator") -> "Operator":
        """What is demanded where either document may be right; this one's where their parameters differ."""
        if self.types != other.types:
            return self
        demands = tuple(ours.or_else(theirs) for ours, theirs in zip(self.demands, other.demands, strict=True))
        return Operator(self.names, self.types, demands)

    def __str__(self) -> str:
        parts = zip(self.names, self.types, self.demands, strict=True)
        return " ".join(f"{name}:{kind}{demand}" for name, kind, demand in parts)


def operators_of(document: str, chip: str) -> Iterator[tuple[str, Operator]]:
    """The operators of one document, by name."""
    for name, prototype in dict(_PROTOTYPE.findall(document)).items():
        named = parameters(prototype)
        begin = re.search(rf"^#+ +`?{name}GetWorkspaceSize`?\s*$", document, re.M)
        if named is None or begin is None:
            continue
        section = document[begin.end() :]
        if end := re.search(rf"^#+ +`?{name}`?\s*$", section, re.M):
            section = section[: end.start()]
        described, _, results = section.partition("返回值")
        demands = dict((from_table if "<table" in described else from_list)(described, chip))
        required = required_names(results)
        yield (
            name,
            Operator(
                tuple(name for name, _ in named),
                tuple(kind for _, kind in named),
                tuple(_of_type(kind, demands.get(name, Demand()), name in required) for name, kind in named),
            ),
        )


def _of_type(kind: str, said: Demand, required: bool) -> Demand:
    """Of what is said of a parameter, that which its type can keep or break."""
    if kind not in ("Tensor", "TensorList"):
        return Demand()
    return Demand(said.dtypes, said.ranks, required, said.contiguous)


def extract(releases: list[Path], chip: str) -> dict[str, Operator]:
    """All operators. Of two documents of one operator in a release the one that is not experimental counts."""
    found: dict[str, Operator] = {}
    for release in releases:
        own: dict[str, Operator] = {}
        documents = sorted(release.rglob("docs/aclnn*.md"), key=lambda path: ("experimental" in path.parts, path))
        for path in documents:
            for name, operator in operators_of(path.read_text(errors="replace"), chip):
                own.setdefault(name, operator)
        for name, operator in own.items():
            found[name] = found[name].or_else(operator) if name in found else operator
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", type=Path, nargs="+")
    parser.add_argument("--calls", type=Path, required=True, help="what extract_calls.py wrote")
    parser.add_argument("--chip", default="Atlas A3", help="the family of chips whose rules are extracted")
    given = parser.parse_args()
    called = {line.split(" ", 1)[0] for line in given.calls.read_text().splitlines()}
    found = extract(given.releases, given.chip)
    print("\n".join(f"{name} {found[name]}" for name in sorted(called & set(found))))


if __name__ == "__main__":
    main()
