"""Extract every aclnn and ATB call from sources that make them: the name, and the order and types of the arguments.

    python extract_calls.py OP_PLUGIN PYTORCH > op_plugin_calls.txt
    python extract_calls.py --mindspeed MINDSPEED > mindspeed_calls.txt
    python extract_calls.py --vllm-ascend VLLM_ASCEND > vllm_ascend_calls.txt

OP_PLUGIN is a checkout of Ascend/op-plugin, PYTORCH one of Ascend/pytorch, MINDSPEED one of Ascend/MindSpeed,
VLLM_ASCEND one of vllm-project/vllm-ascend; the last two have kernels that call CANN themselves. One line for every
form of a call, ``name argument:type ...``. Types are told from the enclosing function's parameters, from local
declarations, and from the schema where the call is generated; ``?`` where none of them says it.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

_CALL = re.compile(
    r"\b(?:EXEC_NPU_CMD(?:_SYNC|_V1)?|EXEC_NPU_NO_FORMAT_CHECK_CMD|EXEC_ATB_CMD|EXEC_GET_MAX_WORKSPACE_CMD|ACLNN_CMD)"
    r"\s*\("
)
# The C interface's type for a declared C++ type; the first match counts.
_DECLARED = [
    (r"TensorList|vector<at::Tensor>", "TensorList"),
    (r"ArrayRef<at::Scalar>|ScalarList|vector<at::Scalar>", "ScalarList"),
    (r"at::Tensor\b|MaybeOwned<.*Tensor", "Tensor"),
    (r"array<bool|ArrayRef<bool>", "BoolArray"),
    (r"ArrayRef<double>|vector<float>|vector<double>", "FloatArray"),
    (r"IntArrayRef|SmallVector<int64_t|ArrayRef<c10::SymInt>|vector<int64_t>|OptionalIntArray|SymIntArray", "IntArray"),
    (r"(at|c10)::Scalar\b|optional<at::Scalar>|^Scalar\b", "Scalar"),
    (r"ScalarType|aclDataType", "DataType"),
    (r"uint64_t", "uint64"),
    (r"int64_t|SymInt|^long", "int64"),
    (r"uint8_t", "uint8"),
    (r"int8_t", "int8"),
    (r"\bint32_t|\bint\b", "int32"),
    (r"\bbool\b", "bool"),
    (r"\bdouble\b", "double"),
    (r"\bfloat\b", "float"),
    (r"char|string", "char*"),
]
# The type of an expression, for arguments that are expressions and for declarations with `auto`.
_EXPRESSION = [
    (
        r"at::Tensor\(\)|apply_tensor|at::empty|at::zeros|at::ones|empty_like|\.to\(|\.contiguous\(|transpose"
        r"|copy_scalar_to_device|unsqueeze|reshape|\.view\(|maybe_wrap(?!_dim)|select\(|\.copy_\(",
        "Tensor",
    ),
    (r"(at|c10)::Scalar|\.item\(", "Scalar"),
    (r"IntArrayRef|SmallVector|array_to_small_vector|\.sizes\(\)|get_dimlist", "IntArray"),
    (r"scalar_type\(\)|dtype|ScalarType", "DataType"),
    (r"get_cube_math", "int8"),
    (r"\btrue\b|\bfalse\b", "bool"),
    (r"generator|philox|\bpair\.(first|second)", "uint64"),
    (r"wrap_dim|\.size\(|\.dim\(\)", "int64"),
    (r"^[-\d]+$", "int32"),
    (r"^[-\d.e]+f$", "float"),
    (r"^[-\d.e]+$", "double"),
]
# The C interface's type for a schema's type.
_SCHEMA = [
    (r"Tensor\S*\[\]", "TensorList"),
    (r"Tensor", "Tensor"),
    (r"Scalar\[\]", "ScalarList"),
    (r"ScalarType", "DataType"),
    (r"Scalar", "Scalar"),
    (r"(Sym)?[iI]nt\[", "IntArray"),
    (r"bool\[", "BoolArray"),
    (r"float\[", "FloatArray"),
    (r"(Sym)?[iI]nt", "int64"),
    (r"bool", "bool"),
    (r"float", "double"),
    (r"str", "char*"),
]


def _first(table: list[tuple[str, str]], text: str) -> str:
    return next((told for pattern, told in table if re.search(pattern, text)), "?")


def _arguments(text: str, start: int) -> list[str]:
    """Return the comma-separated arguments of the call whose opening parenthesis ends before `start`."""
    depth, part, parts = 1, "", []
    for position in range(start, len(text)):
        char = text[position]
        if char in "([{" or (char == "<" and text[position - 1] != " "):
            depth += 1
        elif char in ")]}" or (char == ">" and text[position - 1] not in " -"):
            depth -= 1
            if depth == 0:
                break
        if char == "," and depth == 1:
            parts.append(part.strip())
            part = ""
        else:
            part += char
    return [" ".join(word.split()) for word in [*parts, part.strip()]]


def _type_of(argument: str, before: str) -> str:
    """Return the C type of an argument, told from the function's code `before` the call."""
    if argument == "nullptr":
        return "pointer"
    if re.fullmatch(r"\w+", argument):
        kind_of_declaration = rf"((?:const\s+)?[\w:]+(?:<(?:[^<>;={{}}()]|<[^<>]*>)*>)?)\s*[&*]?\s*\b{argument}\b"
        declared = re.findall(rf"{kind_of_declaration}\s*(?=[,)=;({{])(?:\s*=\s*([^;]*))?", before)
        for kind, value in reversed(declared):
            if re.search(r"\b(return|auto|else|case)\b", kind):
                told = _first(_EXPRESSION, value) if value else "?"
            else:
                told = _first(_DECLARED, kind)
            if told != "?":
                return told
        if "cube_math_type" in argument:
            return "int8"
    return _first(_EXPRESSION, argument)


def _written(root: Path, folders: list[str], suffixes: tuple[str, ...] = (".cpp",)) -> Iterator[str]:
    """Yield the calls in the C++ sources below `folders`."""
    for folder in folders:
        sources = (path for path in (root / folder).rglob("*") if path.suffix in suffixes)
        for path in sorted(sources):
            text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(errors="replace"), flags=re.S)
            for match in _CALL.finditer(text):
                name, *words = _arguments(text, match.end())
                if not re.fullmatch(r"(acl|aclnn|Atb)[A-Z]\w*", name):
                    continue  # the name is a parameter of a macro or a function
                before = text[text.rfind("\n}", 0, match.start()) + 1 : match.start()]
                yield " ".join([name, *(f"{word.replace(' ', '')}:{_type_of(word, before)}" for word in words)])


def _generated(root: Path) -> Iterator[str]:
    """Yield the calls that op-plugin generates from ``exec: aclnnX, arguments`` beside a schema in its list."""
    text = (root / "op_plugin/config/op_plugin_functions.yaml").read_text()
    for block in re.split(r"\n\s*- func: ", text)[1:]:
        schema = re.match(r"[\w.]+\s*\((.*)\)\s*->\s*(.*)$", block.splitlines()[0])
        calls = re.findall(r"^\s+(?:- param: (\w+)\n\s+)?exec: (aclnn.*)$", block, re.M)
        if not schema or not calls:
            continue
        inside, results = schema.groups()
        types = {}
        for word in re.sub(r"\([a-z]!?( -> [a-z])?\)", "", inside).split(", "):
            if " " in word:
                kind, name = word.split("=")[0].split()[:2]
                types[name] = _first(_SCHEMA, kind)
        parameters = list(types)
        for name in re.findall(r"^ +(\w+):\n +(?:size|dtype):", block, re.M):
            types.setdefault(name, "Tensor")
        count = 0 if "!" in results or results == "()" else results.count("Tensor")
        for scalar, call in calls:
            name, *words = (word.strip() for word in call.split(","))
            if not words:
                words = [*parameters, *(["out"] if count == 1 else [f"out{index}" for index in range(count)])]
            for word in words:
                if re.fullmatch(r"out\d*", word):
                    types.setdefault(word, "Tensor")
            told = types | ({scalar: "Scalar"} if scalar else {})  # a tensor of the host, given as the number in it
            yield " ".join([name, *(f"{word}:{told.get(word, '?')}" for word in words)])


def extract(op_plugin: Path, torch_npu: Path) -> list[str]:
    """Return all forms of calls, sorted, each once."""
    lines = set(_generated(op_plugin))
    lines.update(_written(op_plugin, ["op_plugin/ops", "op_plugin/utils"]))
    lines.update(_written(torch_npu, ["torch_npu/csrc/aten"]))
    return sorted(lines)


def extract_mindspeed(mindspeed: Path) -> list[str]:
    return sorted(set(_written(mindspeed, ["mindspeed/ops/csrc"])))


def extract_vllm_ascend(vllm_ascend: Path) -> list[str]:
    return sorted(set(_written(vllm_ascend, ["csrc"], (".cpp", ".h"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", metavar="OP_PLUGIN PYTORCH")
    parser.add_argument("--mindspeed", type=Path)
    parser.add_argument("--vllm-ascend", type=Path)
    given = parser.parse_args()
    chosen = [bool(given.checkouts), bool(given.mindspeed), bool(given.vllm_ascend)]
    if sum(chosen) != 1 or len(given.checkouts) not in (0, 2):
        parser.error("pass the checkouts of op-plugin and torch_npu, or of MindSpeed, or of vLLM-Ascend")
    if given.checkouts:
        found = extract(*given.checkouts)
    elif given.mindspeed:
        found = extract_mindspeed(given.mindspeed)
    else:
        found = extract_vllm_ascend(given.vllm_ascend)
    print("\n".join(found))


if __name__ == "__main__":
    main()
