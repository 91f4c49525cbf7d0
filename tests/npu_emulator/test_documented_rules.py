"""The demands of operators' documents: extraction, rejection of forbidden calls, acceptance of allowed ones."""

import json
import tomllib

import pytest

from tests.npu_emulator.documented import EXCEPTIONS, RULES, load, read_rules
from tests.npu_emulator.engine_process import finish, start

extract_rules, documented, relations = load("extract_rules"), load("documented"), load("documented_relations")
# The two forms of the documents, shortened: a table of parameters, and a list of them.
TABLE = """
| 产品 | 是否支持 |
| :--- | :---: |
| <term>Atlas A3 训练系列产品/Atlas A3 推理系列产品</term> | × |
| <term>Atlas A2 训练系列产品/Atlas A2 推理系列产品</term> | √ |
| <term>Atlas 200I/500 A2 推理产品</term> | × |

```Cpp
aclnnStatus aclnnScaleGetWorkspaceSize(
  const aclTensor *x,
  double           factor,
  int64_t          turns,
  const aclTensor *indexOptional,
  aclTensor       *out,
  uint64_t        *workspaceSize,
  aclOpExecutor  **executor)
```
## aclnnScaleGetWorkspaceSize
- **参数说明：**
  <table><thead>
    <tr><th>参数名</th><th>输入/输出</th><th>描述</th><th>使用说明</th><th>数据类型</th><th>数据格式</th>
    <th>维度(shape)</th><th>非连续Tensor</th></tr></thead>
  <tbody>
    <tr><td>x</td><td>输入</td><td>输入。</td><td><ul><li>支持空Tensor。</li></ul></td><td>FLOAT、FLOAT16</td>
    <td>ND</td><td>1-3</td><td>×</td></tr>
    <tr><td>factor</td><td>输入</td><td>系数。</td><td>-</td><td>DOUBLE</td><td>-</td><td>-</td><td>-</td></tr>
    <tr><td>turns</td><td>输入</td><td>切分数。</td><td>当前版本仅支持输入0。</td><td>INT64</td><td>-</td><td>-</td>
    <td>-</td></tr>
    <tr><td>indexOptional</td><td>输入</td><td>索引。</td><td>-</td><td rowspan="2">与x一致</td><td>ND</td>
    <td>0、2</td><td>√</td></tr>
    <tr><td>out（aclTensor*）</td><td>输出</td><td>输出。</td><td>-</td><td>ND</td><td>不超过8维</td><td>√</td></tr>
  </tbody></table>
- **返回值：**
  <table><tr><td>ACLNN_ERR_PARAM_NULLPTR</td><td>161001</td><td>传入的x或out是空指针。</td></tr>
  <tr><td>ACLNN_ERR_PARAM_INVALID</td><td>161002</td><td>indexOptional的数据类型不在支持的范围之内。</td></tr></table>

## aclnnScale
"""
LIST = """
- `aclnnStatus aclnnScaleGetWorkspaceSize(const aclTensor *x, double factor, int64_t turns, \
const aclTensor* indexOptional, aclTensor *out, uint64_t *workspaceSize, aclOpExecutor **executor)`

## aclnnScaleGetWorkspaceSize
- **参数说明：**

  - x(aclTensor*, 计算输入)：输入，shape支持1维-3维，数据格式支持ND。
    - <term>Atlas 训练系列产品</term>：数据类型支持INT8。
    - <term>Atlas A3 训练系列产品/Atlas A3 推理系列产品</term>：数据类型支持FLOAT、BFLOAT16，数据类型与out一致。
  - factor(double, 计算输入)：系数。
  - turns(int64_t, 计算输入)：切分数，取值范围为[0, 4]。
  - indexOptional(aclTensor*, 计算输入)：索引，数据类型支持INT32、INT64，数据维度不支持8维以上。
  - out(aclTensor *, 计算输出)：输出，数据类型需要可转换。

- **返回值：**

  返回161001（ACLNN_ERR_PARAM_NULLPTR）：1. 传入的x为空指针，或者indexOptional、out全为空指针。
  返回161002（ACLNN_ERR_PARAM_INVALID）：1. out的数据类型不在支持的范围之内。
"""


def extracted(document):
    (found,) = extract_rules.operators_of(document, "Atlas A3")
    assert found[0] == "aclnnScale"
    return str(found[1]).split(" ")[1:]


def test_a_table_is_read_with_its_ranks_strides_and_null_pointers():
    assert extracted(TABLE) == [
        "x:Tensor|FLOAT,FLOAT16|1-3|required,contiguous",
        "factor:double",
        "turns:int64=0",
        "indexOptional:Tensor||0,2|dtype=x",
        "out:Tensor||0-8|required,dtype=x",
    ]


def test_a_list_is_read_for_the_chip_alone():
    assert extracted(LIST) == [
        "x:Tensor|BFLOAT16,FLOAT|1-3|required,dtype=out",
        "factor:double",
        "turns:int64=0..4",
        "indexOptional:Tensor|INT32,INT64|0-8",
        "out:Tensor",
    ]


def test_what_is_said_of_each_parameter_of_a_list_is_its_own():
    section = "".join(
        f"- {name}(aclTensor*, 计算输入)：数据类型支持{kind}。\n"
        for name, kind in (("x", "INT8"), ("y", "FLOAT16"), ("out", "INT64"))
    )
    found = {name: str(demand) for name, demand in extract_rules.from_list(section, "Atlas A3", {})}
    assert found == {"x": "|INT8", "y": "|FLOAT16", "out": "|INT64"}


def test_value_allowed_by_one_of_two_releases_accepted(tmp_path):
    for release, document in (("old", TABLE), ("new", LIST)):
        folder = tmp_path / release / "ops-math" / "scale" / "docs"
        folder.mkdir(parents=True)
        (folder / "aclnnScale.md").write_text(document)
    found = extract_rules.extract([tmp_path / "old", tmp_path / "new"], "Atlas A3")
    assert str(found["aclnnScale"]).split(" ")[1:] == [
        "x:Tensor|BFLOAT16,FLOAT,FLOAT16|1-3|required,dtype=out",
        "factor:double",
        "turns:int64=0..4",
        "indexOptional:Tensor|INT32,INT64|0-8|dtype=x",
        "out:Tensor||0-8|dtype=x",
    ]


# Sentences on values, quoted from the documents.
@pytest.mark.parametrize(
    ("kind", "said", "values"),
    [
        ("int64", "通信数据切分数，即总数据量/单次通信量。当前版本仅支持输入0。", "0"),
        ("int64", "表示分组类型。仅支持2（K轴分组）。", "2"),
        ("int64", "输出结果计算方式。仅支持0,1,2三个值：\n0表示不做任何操作", "0,1,2"),
        ("int64", "表示不同模式取值为-1、0和2\n0：表示 comsum 模式", "-1,0,2"),
        ("int64", "表示使用的索引类型取值为0、1（性能模板仅支持1）", "0,1"),
        ("int32", "指定输出的数据类型。\n支持取值2，3，29，分别表示INT8，INT32，INT4。", "2,3,29"),
        ("int64", "预留参数。当前版本不支持，传0即可。", "0"),
        ("int64", "MoE专家数量。取值范围(0, 512]，且满足整除。", "1..512"),
        ("int64", "代表groupList输入的分组方式。取值范围0-2。", "0..2"),
        ("int64", "直方图bins的数量。取值范围需大于0。", "1.."),
        ("int64", "表示每个专家能够处理的tokens数取值范围大于等于0", "0.."),
        ("bool", "左矩阵是否转置，仅支持false。", "0"),
        ("char*", 'reduce操作类型。当前版本仅支持输入"sum"。', "sum"),
        ("char*", "支持BSH、SBH、BSND、BNSD、TND。\n当前仅支持TND。", "TND"),
        ("char*", "表示支持的量化类型，目前仅支持`page`和`contiguous`，默认为`page`。", "contiguous,page"),
        ("char*", '仅支持char*类型\n可选值为"PA_BSND"、"PA_NZ"', "PA_BSND,PA_NZ"),
        # Conditions, relations, fractions, units, and cases that are not rejected.
        ("int64", "在mx量化模式，仅支持32。", None),
        ("int64", "动态量化时只支持1。", None),
        ("int64", "指定的维度。取值范围为[-self.dim(), self.dim()-1]。", None),
        ("int64", "仅支持取值为16的整数倍，最大支持到128。", None),
        ("int64", "取值仅支持1e-5。", None),
        ("int64", "当前仅支持-1，传其他值均不生效。", None),
        ("bool", "仅支持取值true或false。", None),
        ("double", "取值范围为(0, 1]。", None),
    ],
)
def test_what_a_number_or_a_string_may_be_is_read_from_a_sentence(kind, said, values):
    found = extract_rules.allowed_values(kind, said)
    assert (found and str(found)) == values


# Sentences on two tensors, quoted from the documents.
@pytest.mark.parametrize(
    ("said", "column", "expected"),
    [
        ("shape需要与self一致。", "", "shape=self"),
        ("数据类型、数据格式和shape与入参`x1`的数据类型、数据格式和shape一致。", "", "dtype=x1 shape=x1"),
        ("shape、数据类型与输入`x1`的shape、数据类型保持一致。", "", "dtype=x1 shape=x1"),
        ("gradOutput、self与gradInput的数据类型和shape一致。", "", "dtype=gradInput dtype=gradOutput dtype=self "
         "shape=gradInput shape=gradOutput shape=self"),
        ("数据类型需要是self可转换的数据类型，shape与self相同。", "", "shape=self"),
        ("数据类型要和x保持一致。", "", "dtype=x"),
        ("与`self`保持一致", "shape", "shape=self"),
        ("与x一致", "dtype", "dtype=x"),
        ("与x一致", "", ""),
        ("shape需要与self满足[broadcast关系](../../docs/zh/context/broadcast关系.md)。", "", "broadcasts=self"),
        ("self与x、y的shape满足broadcast关系。", "", "broadcasts=self broadcasts=x broadcasts=y"),
        ("shape可以broadcast到self的shape。", "", "broadcasts=self"),
        ("shape需要是self与other broadcast之后的shape。", "", "broadcast_of=self+other"),
        ("out与self、tensor1、tensor2 broadcast之后的tensor的shape一致", "", "broadcast_of=self+tensor1+tensor2"),
        # Conditions, single dimensions, batches of products, and advice.
        ("当groupType为0时，shape与x一致。", "", ""),
        ("其他类型时，shape与x一致", "", ""),
        ("shape需要与`x1`后几维保持一致，后几维为`x1`需要norm的维度。", "", ""),
        ("shape为[N]，长度与x的N维长度一致", "", ""),
        ("需要与mat2满足broadcast关系。", "", ""),
        ("noise需要不小于self（shape建议与self一致）。", "", ""),
    ],
)  # fmt: skip
def test_how_two_tensors_go_together_is_read_from_a_sentence(said, column, expected):
    found = relations.of_parameter(said, column)
    assert " ".join(sorted(f"{kind}={names}" for kind, names in found)) == expected


def test_tensor_relations_are_read_from_rejections():
    refused = (
        "self和out的shape不一致",
        "self和mask的shape无法做broadcast",
        "x1、x2的数据类型不相同",
        "out的shape不是self与other broadcast之后的shape",
        "当reduction为0时，self和out的shape不一致",
    )
    said = "".join(f"{number}. {each}。\n" for number, each in enumerate(refused, 1))
    assert list(relations.of_refusals(said)) == [
        ("out", "shape", "self"),
        ("mask", "broadcasts", "self"),
        ("x2", "dtype", "x1"),
        ("out", "broadcast_of", "self+other"),
    ]


def test_where_documents_contradict_each_other_less_is_demanded():
    same, fits = ("shape", "self"), ("broadcasts", "self")
    assert relations.weaker(frozenset({same}), frozenset()) == {same}
    assert relations.weaker(frozenset({same}), frozenset({fits})) == {fits}
    assert relations.weaker(frozenset({same}), frozenset({("shape", "other")})) == frozenset()
    assert relations.weaker(frozenset({same}), frozenset({("dtype", "self")})) == {same, ("dtype", "self")}
    kinds = {"self": "Tensor", "out": "Tensor", "list": "TensorList", "dim": "int64"}
    assert relations.known("out", [same, fits, ("shape", "list"), ("dtype", "N"), ("dtype", "out")], kinds) == {fits}


def test_of_two_lists_of_values_all_are_allowed_and_of_a_range_what_lies_between():
    values = extract_rules.Values
    assert str(values(frozenset({"TND"})).or_else(values(frozenset({"BSH"})))) == "BSH,TND"
    assert str(values(frozenset({"-1", "2"})).or_else(values(least=0, most=1))) == "-1..2"
    assert str(values(least=1).or_else(values(least=0, most=5))) == "0.."


def test_a_chip_lacks_an_operator_where_its_document_and_the_sources_of_its_kernels_say_so():
    both = 'AddConfig("ascend910b"); AddConfig("ascend910_93", x)'
    assert extract_rules.chips_with(TABLE, 'AddConfig("ascend910b")') == {"A2"}
    for kernels in (both, "", 'AddConfig("ascend950")'):
        assert extract_rules.chips_with(TABLE, kernels) == {"A2", "A3"}
    assert extract_rules.chips_with(LIST, 'AddConfig("ascend910b")') == {"A2", "A3"}
    ((_, operator),) = extract_rules.operators_of(TABLE, "Atlas A3", 'AddConfig("ascend910b")')
    assert str(operator).startswith("|A2 x:Tensor|")


def test_a_type_that_is_not_known_demands_nothing():
    assert extract_rules.element_types("FLOAT、HIFLOAT8") == {"FLOAT", "HIFLOAT8"}
    assert extract_rules.element_types("FLOAT、FLOAT13") is None
    assert extract_rules.element_types("与self一致") is None


def source_of(relations: list[str], demands: list[str], documents: list[str]) -> str:
    """Return the three tables as C++."""
    tables = {"Relation kRelations": relations, "Demand kDemands": demands, "Document kDocuments": documents}
    rows = {name: "".join(f"{row},\n" for row in table) for name, table in tables.items()}
    return "".join(f"constexpr {name}[] = {{\n{text}}};\n" for name, text in rows.items())


def test_an_exception_takes_one_demand_away_and_must_be_of_one():
    x = "x:Tensor|BFLOAT16,FLOAT8_E5M2|1-2|required,broadcast_of=y+z,dtype=z"
    rules = f"aclnnScale|A2 {x} turns:int64=0,2 y:Tensor z:Tensor"
    entry = {"operator": "aclnnScale", "parameter": "x", "demand": "ranks", "reason": "for this test"}
    related = ["{Agreement::kBroadcastOf, 1ull << 2 | 1ull << 3}", "{Agreement::kDtype, 1ull << 3}"]
    parameters = ['{"x", 1ull << ACL_BF16, 6, true, false, "", kRelations + 0, 2}']
    for name, values in (("turns", "0,2"), ("y", ""), ("z", "")):
        parameters.append(f'{{"{name}", 0, 0, false, false, "{values}", kRelations + 2, 0}}')
    source = source_of([*related, "{}"], parameters, ['{"aclnnScale", "A2", kDemands + 0, 4}'])
    assert documented.demands(rules, []) == source
    assert documented.demands(rules, [entry]) == source.replace("BF16, 6", "BF16, 0")
    without_dtype = source.replace(f"{related[1]},\n", "").replace("kRelations + 2, 0", "kRelations + 1, 0")
    without_dtype = without_dtype.replace("kRelations + 0, 2", "kRelations + 0, 1")
    assert documented.demands(rules, [entry | {"demand": "dtype"}]) == without_dtype
    entry_of_values = entry | {"parameter": "turns", "demand": "values"}
    assert documented.demands(rules, [entry_of_values]) == source.replace("0,2", "")
    with pytest.raises(ValueError, match="lists rules that no document has.*contiguous"):
        documented.demands(rules, [entry | {"demand": "contiguous"}])


def test_every_exception_has_its_reason():
    entries = tomllib.loads(EXCEPTIONS.read_text())["exception"]
    assert all(len(entry["reason"]) > 20 for entry in entries)
    assert len({(entry["operator"], entry["parameter"], entry["demand"]) for entry in entries}) == len(entries)


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """The results of `documented_program` with the committed rules."""
    return try_all(tmp_path_factory.mktemp("documented") / "results.json", RULES)


def try_all(results, rules, strict="1", chip="Ascend910_9391"):
    finish(start("documented_program", results, rules, NPU_EMULATOR_STRICT=strict, NPU_EMULATOR_CHIP=chip))
    return json.loads(results.read_text())


def test_documented_limits_are_enforced(tried):
    assert tried["wrong"] == []
    assert tried["counts"]["dtypes"] > 900 and tried["counts"]["ranks"] > 600
    assert tried["counts"]["required"] > 800 and tried["counts"]["contiguous"] > 40
    assert tried["counts"]["values"] > 40
    assert tried["counts"]["shape"] > 250 and tried["counts"]["broadcasts"] > 150
    assert tried["counts"]["broadcast_of"] > 30 and tried["counts"]["dtype"] > 300


def test_an_operator_that_a_chip_lacks_rejected_there_alone(tried, tmp_path):
    """Sums of products over ranks are an Atlas A2's."""
    assert {name: code for name, code, _ in tried["absent"]} == {
        "aclnnMatmulAllReduce": 561112, "aclnnMatmulAllReduceV2": 561112, "aclnnQuantMatmulAllReduce": 561112,
        "aclnnQuantMatmulAllReduceV2": 561112, "aclnnWeightQuantMatmulAllReduce": 561112,
    }  # fmt: skip
    assert "Op MatmulAllReduce does not has any binary" in tried["absent"][0][2]
    found = try_all(tmp_path / "results.json", RULES, chip="Ascend910B3")
    assert found["absent"] == found["wrong"] == []
    assert found["counts"]["values"] > tried["counts"]["values"]


def test_parameters_are_those_of_the_documents(tried):
    """The documents of six operators give one whole number another width than op-plugin passes it with."""
    assert {each.partition(":")[0] for each in tried["different"]} == {
        "aclnnAscendQuant", "aclnnAscendQuantV3", "aclnnConvolutionBackward", "aclnnDynamicQuantV2", "aclnnOneHot",
        "aclnnQuantMatmulWeightNz",
    }  # fmt: skip
    # Documents of operators that resize images are in a repository that is not read.
    others = [name for name in tried["undocumented"] if not name.startswith(("aclnnUpsample", "aclnnGridSampler"))]
    assert others == ["AtbMLA", "AtbPagedCacheLoad", "AtbRingMLA", "aclStft", "aclnnIm2colBackward"]


def test_reference_runs_may_give_float32_where_kernels_take_16_bits(tried, tmp_path):
    """Hardly anything else that strict mode rejects is allowed."""
    found = try_all(tmp_path / "results.json", RULES, strict="float32")
    assert {"aclnnKvRmsNormRopeCache", "aclnnFusedInferAttentionScoreV3"} < set(tried["refused_in_float32"])
    assert found["refused_in_float32"] == [] and found["counts"] == tried["counts"]
    # If the call has no other floating-point tensor, the forbidden float32 is the type of all of them.
    assert {each.partition(",")[0] for each in found["wrong"]} == {
        "aclnnDequantSwigluQuant", "aclnnGroupedMatmulWeightNz", "aclnnQuantMatmulV3", "aclnnQuantMatmulV4",
    }  # fmt: skip


def test_outside_strict_mode_everything_is_taken(tried, tmp_path):
    found = try_all(tmp_path / "results.json", RULES, strict="0")
    assert len(found["wrong"]) == sum(tried["counts"].values())


def test_unserved_demand_is_found(tmp_path):
    """Control: rules that the emulated CANN was not built from."""
    rules = tmp_path / "rules.txt"
    rules.write_text("aclnnSilu self:Tensor|INT8|0-8 out:Tensor|BFLOAT16,FLOAT,FLOAT16|0-8\n")
    (wrong,) = try_all(tmp_path / "results.json", rules)["wrong"]
    assert "aclnnSilu: arguments that its document takes are refused with 161002" in wrong and "Tensor self" in wrong


def test_rules_name_operators_once_and_every_demand_is_one_that_can_be_read():
    rules = read_rules(RULES.read_text(), "exception = []")
    assert len(rules) == len(RULES.read_text().splitlines()) > 600
    assert sum(bool(parameter.dtypes) for each in rules.values() for parameter in each) > 1500
