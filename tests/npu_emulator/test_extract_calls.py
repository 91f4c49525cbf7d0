"""Reading the calls of aclnn and ATB from op-plugin and MindSpeed, from which the committed tables are made."""

from tests.npu_emulator.documented import load

WRITTEN = """
// EXEC_NPU_CMD(aclnnCommentedOut, self);
at::Tensor scaled(const at::Tensor& self, const c10::optional<at::Tensor>& other, double factor, int64_t count)
{
    auto result = at::empty_like(self);
    const at::Scalar limit = 1;
    EXEC_NPU_CMD(aclnnScaled, self, other, factor, count, limit, at::Tensor(), at::IntArrayRef({1, 2}), true, result);
    EXEC_NPU_CMD(name, self);
    return result;
}

at::Tensor another(const at::Scalar& self, at::ScalarType dtype)
{
    EXEC_ATB_CMD(AtbAnother, self, dtype, nullptr, 0.5);
}
"""
GENERATED = """
official:
  - func: sign(Tensor self, int dim=-1, *, ScalarType? dtype=None, Scalar? alpha=1) -> Tensor
    op_api: all_version
    gen_opapi:
      out:
        size: self
        dtype: self
      exec: aclnnSign, self, dim, dtype, alpha, out
  - func: abs_(Tensor(a!) self) -> Tensor(a!)
    gen_opapi:
      exec: aclnnInplaceAbs
"""


def test_calls_are_found_with_the_types_of_their_arguments(tmp_path):
    sources, config = tmp_path / "op_plugin" / "ops", tmp_path / "op_plugin" / "config"
    for folder in (sources, config, tmp_path / "torch_npu" / "csrc" / "aten"):
        folder.mkdir(parents=True)
    (sources / "Scaled.cpp").write_text(WRITTEN)
    (config / "op_plugin_functions.yaml").write_text(GENERATED)
    assert load("extract_calls").extract(tmp_path, tmp_path) == [
        "AtbAnother self:Scalar dtype:DataType nullptr:pointer 0.5:double",
        "aclnnInplaceAbs self:Tensor",
        "aclnnScaled self:Tensor other:Tensor factor:double count:int64 limit:Scalar at::Tensor():Tensor "
        "at::IntArrayRef({1,2}):IntArray true:bool result:Tensor",
        "aclnnSign self:Tensor dim:int64 dtype:DataType alpha:Scalar out:Tensor",
    ]


def test_calls_of_kernels_of_mindspeed_are_found(tmp_path):
    sources = tmp_path / "mindspeed" / "ops" / "csrc" / "cann"
    sources.mkdir(parents=True)
    (sources / "scaled.cpp").write_text(WRITTEN.replace("EXEC_NPU_CMD(aclnnScaled", "ACLNN_CMD(aclnnOfMindSpeed"))
    (found,) = (line for line in load("extract_calls").extract_mindspeed(tmp_path) if line.startswith("aclnn"))
    assert found.startswith("aclnnOfMindSpeed self:Tensor other:Tensor factor:double count:int64")
