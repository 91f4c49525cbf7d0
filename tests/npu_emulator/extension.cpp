// An extension as users of CANN write them: it links libascendcl and libatb, and looks aclnn functions up by name.
#include <acl/acl.h>
#include <atb/infer_op_params.h>
#include <atb/operation.h>
#include <dlfcn.h>
#include <torch/extension.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

namespace {

std::string chip() { return aclrtGetSocName(); }

template <class Result, class... Arguments>
Result call(const char* name, Arguments... arguments) {
  for (const char* library : {"libcust_opapi.so", "libopapi.so"}) {  // operators of the user's own come first
    void* handle = dlopen(library, RTLD_LAZY);
    void* function = handle ? dlsym(handle, name) : nullptr;
    if (function) return reinterpret_cast<Result (*)(Arguments...)>(function)(arguments...);
  }
  TORCH_CHECK(false, "no library has ", name);
}

void* described(const at::Tensor& tensor) {
  const int64_t size = tensor.numel(), stride = 1;
  return call<void*>("aclCreateTensor", &size, uint64_t{1}, ACL_FLOAT, &stride, int64_t{0}, ACL_FORMAT_ND, &size,
                     uint64_t{1}, tensor.data_ptr());
}

at::Tensor negative(const at::Tensor& self) {
  const auto result = at::empty_like(self);
  void *from = described(self), *to = described(result), *executor = nullptr;
  uint64_t bytes = 0;
  TORCH_CHECK(call<int>("aclnnNegGetWorkspaceSize", from, to, &bytes, &executor) == 0 && bytes == 0);
  void* stream = c10_npu::getCurrentNPUStream().stream(false);
  at_npu::native::OpCommand::RunOpApi("aclnnNeg", [=]() -> int {
    const auto status = call<int>("aclnnNeg", static_cast<void*>(nullptr), uint64_t{0}, executor, stream);
    for (void* tensor : {from, to}) call<int>("aclDestroyTensor", tensor);
    return status;
  });
  return result;
}

atb::Tensor matrix(const at::Tensor& tensor) {
  atb::Tensor found;
  found.desc = {ACL_FLOAT, ACL_FORMAT_ND, {{tensor.size(0), tensor.size(1)}, 2}};
  found.deviceData = tensor.data_ptr();
  found.dataSize = atb::Utils::GetTensorSize(found);
  return found;
}

at::Tensor product(const at::Tensor& self, const at::Tensor& other) {
  const auto result = at::empty({self.size(0), other.size(1)}, self.options());
  atb::infer::LinearParam parameters;
  parameters.transposeB = parameters.hasBias = false;
  atb::Operation* operation = nullptr;
  atb::Context* context = nullptr;
  TORCH_CHECK(atb::CreateOperation(parameters, &operation) == 0 && atb::CreateContext(&context) == 0);
  context->SetExecuteStream(c10_npu::getCurrentNPUStream().stream());  // what waits in the queue comes before it
  atb::VariantPack pack;
  for (const auto& tensor : {self, other}) pack.inTensors.push_back(matrix(tensor));
  pack.outTensors.push_back(matrix(result));
  uint64_t bytes = 0;
  TORCH_CHECK(operation->Setup(pack, bytes, context) == 0 && bytes == 0);
  TORCH_CHECK(operation->Execute(pack, nullptr, bytes, context) == 0);
  atb::DestroyOperation(operation);
  atb::DestroyContext(context);
  return result;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("chip", chip);
  module.def("negative", negative);
  module.def("product", product);
}
