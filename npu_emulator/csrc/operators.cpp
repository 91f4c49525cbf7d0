#include "formats.h"

#include <cstring>
#include <sstream>

namespace cann {

at::ScalarType scalar_type(int acl_dtype) {
  switch (acl_dtype) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_INT8: return at::kChar;
    case ACL_INT32: return at::kInt;
    case ACL_UINT8: return at::kByte;
    case ACL_INT16: return at::kShort;
    case ACL_INT64: return at::kLong;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_BOOL: return at::kBool;
    case ACL_COMPLEX64: return at::kComplexFloat;
    case ACL_COMPLEX128: return at::kComplexDouble;
    case ACL_BF16: return at::kBFloat16;
    case ACL_COMPLEX32: return at::kComplexHalf;
  }
  TORCH_CHECK(false, "aclDataType ", acl_dtype, " is not emulated");
}

namespace {

size_t width(int acl_dtype) { return c10::elementSize(scalar_type(acl_dtype)); }

void* data_of(const aclTensor& tensor) { return static_cast<char*>(tensor.data) + tensor.offset * width(tensor.dtype); }

}  // namespace

Tensor view(const aclTensor* tensor) {
  if (!tensor) return {};
  TORCH_CHECK(is_plain(tensor->format), "private format ", static_cast<int>(tensor->format),
              " is not emulated here: npu_format_cast(tensor, 2) gives the plain one");
  const auto seen = at::from_blob(data_of(*tensor), tensor->dims, tensor->strides,
                                  at::TensorOptions().dtype(scalar_type(tensor->dtype)));
  return may_run_later() && seen.numel() && !is_on_device(tensor->data) ? seen.clone() : seen;
}

Weight weight(const aclTensor* tensor) {
  if (tensor && tensor->format == ACL_FORMAT_FRACTAL_NZ) return {{}, *tensor};
  return {view(tensor), std::nullopt};
}

Scalar value(const aclScalar* scalar) {
  if (!scalar) return {};
  const auto* bytes = scalar->bytes;
  switch (scalar->dtype) {
    case ACL_DOUBLE: return *reinterpret_cast<const double*>(bytes);
    case ACL_FLOAT: return *reinterpret_cast<const float*>(bytes);
    case ACL_INT64: return *reinterpret_cast<const int64_t*>(bytes);
    case ACL_INT32: return *reinterpret_cast<const int32_t*>(bytes);
    case ACL_BOOL: return *reinterpret_cast<const bool*>(bytes);
    default: break;
  }
  return at::from_blob(const_cast<char*>(bytes), {}, at::TensorOptions().dtype(scalar_type(scalar->dtype))).item();
}

void Dynamic::fill(const Tensor& result) const {
  if (!raw) return;
  TORCH_CHECK(result.numel() <= c10::multiply_integers(raw->dims), "there is room for ",
              c10::multiply_integers(raw->dims), " elements of ", result.numel());
  raw->dims = result.sizes().vec();
  at::from_blob(data_of(*raw), raw->dims, at::TensorOptions().dtype(scalar_type(raw->dtype))).copy_(result);
}

std::map<std::string, std::string>& signatures() {
  static std::map<std::string, std::string> all;
  return all;
}

void add_signature(const char* operator_name, std::initializer_list<const char*> types) {
  std::string joined;
  for (const char* type : types) joined += (joined.empty() ? "" : " ") + std::string(type);
  signatures()[operator_name] = joined;
}

HostKernels::HostKernels()
    : inference_(true),
      modes_(c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::AutocastCPU})) {}
HostKernels::~HostKernels() = default;

int failed_call(const char* operator_name) {
  const std::string name = std::string(operator_name) + ": ";
  try {
    throw;
  } catch (const Refused& refused) {
    return fail(refused.code, name + refused.what());
  } catch (const c10::Error& error) {
    return fail(kInvalidArgument, name + error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(kInvalidArgument, name + error.what());
  }
}

int execute(void*, uint64_t, aclOpExecutor* executor, void* stream) {
  const std::unique_ptr<aclOpExecutor> owned(executor);
  try {
    submit(stream, owned->name, std::move(owned->run));
    return 0;
  } catch (...) {
    return failed_call(owned->name);
  }
}

}  // namespace cann

using namespace cann;

// For a call whose workspace was asked for and that was never executed: execution destroys the executor.
CANN_API int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return 0;
}

CANN_API aclTensor* aclCreateTensor(const int64_t* dims, uint64_t count, aclDataType dtype, const int64_t* strides,
                                    int64_t offset, aclFormat format, const int64_t* storage, uint64_t storage_count,
                                    void* data) {
  return new aclTensor{{dims, dims + count}, {strides, strides + count}, offset, dtype, format, data,
                       {storage, storage + storage_count}};
}
CANN_API int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return 0;
}
CANN_API aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
  auto* scalar = new aclScalar{dtype, {}};
  std::memcpy(scalar->bytes, value, width(dtype));
  return scalar;
}
CANN_API int aclDestroyScalar(const aclScalar* scalar) {
  delete scalar;
  return 0;
}
CANN_API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new aclIntArray{{values, values + count}};
}
CANN_API int aclDestroyIntArray(const aclIntArray* array) {
  delete array;
  return 0;
}
CANN_API aclFloatArray* aclCreateFloatArray(const float* values, uint64_t count) {
  return new aclFloatArray{{values, values + count}};
}
CANN_API int aclDestroyFloatArray(const aclFloatArray* array) {
  delete array;
  return 0;
}
CANN_API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) {
  // In braces, two pointers would be two truth values.
  return new aclBoolArray{std::vector<bool>(values, values + count)};
}
CANN_API int aclDestroyBoolArray(const aclBoolArray* array) {
  delete array;
  return 0;
}
CANN_API aclTensorList* aclCreateTensorList(const aclTensor* const* values, uint64_t count) {
  return new aclTensorList{{values, values + count}};
}
CANN_API int aclDestroyTensorList(const aclTensorList* list) {
  for (const auto* tensor : list->values) delete tensor;
  delete list;
  return 0;
}
CANN_API aclScalarList* aclCreateScalarList(const aclScalar* const* values, uint64_t count) {
  return new aclScalarList{{values, values + count}};
}
CANN_API int aclDestroyScalarList(const aclScalarList* list) {
  for (const auto* scalar : list->values) delete scalar;
  delete list;
  return 0;
}
CANN_API int aclGetViewShape(const aclTensor* tensor, int64_t** dims, uint64_t* count) {
  *count = tensor->dims.size();
  *dims = new int64_t[*count];  // which torch_npu deletes
  std::copy(tensor->dims.begin(), tensor->dims.end(), *dims);
  return 0;
}

// For tests: a line for every operator that is written, "name: types", until the next call.
CANN_API const char* npu_emulator_cann_operators() {
  static std::string text;
  text.clear();
  for (const auto& [name, types] : signatures()) text += name + ": " + types + "\n";
  return text.c_str();
}

// ---- operators that op-plugin calls and nobody wrote: refused with their arguments
namespace {

// `parameters` is "name:type name:type ..."; `registers` the first six that travel as whole numbers or addresses.
std::string described(const char* parameters, const intptr_t* registers) {
  constexpr int kRegisters = 6;
  std::istringstream words(parameters);
  std::string text, word;
  for (int at_register = 0; words >> word;) {
    text += (text.empty() ? "" : ", ") + word;
    const auto type = word.substr(word.rfind(':') + 1);
    if (type == "double" || type == "float") continue;
    if (type == "?") at_register = kRegisters;  // what follows cannot be placed
    if (at_register < kRegisters) {
      const auto given = registers[at_register];
      if (type == "Tensor" && given) {
        const auto& tensor = *reinterpret_cast<const aclTensor*>(given);
        text += "=" + std::string(c10::toString(scalar_type(tensor.dtype))) + c10::str(at::IntArrayRef(tensor.dims));
      } else if (type == "int64" || type == "uint64" || type == "bool" || type == "int8") {
        text += "=" + std::to_string(type == "bool" ? (given & 1) : type == "int8" ? int8_t(given) : given);
      }
    }
    ++at_register;
  }
  return text;
}

int refuse(const char* name, const char* parameters, const intptr_t* registers) {
  const auto arguments = described(parameters, registers);
  return fail(kNoKernel, std::string(name) + " is not emulated; it was called with " + arguments);
}

}  // namespace

// Weak, so that a file that writes the operator takes the name.
#define REFUSED(NAME, PARAMETERS)                                                                                    \
  extern "C" __attribute__((visibility("default"), weak)) int NAME##GetWorkspaceSize(                                \
      intptr_t a, intptr_t b, intptr_t c, intptr_t d, intptr_t e, intptr_t f) {                                      \
    const intptr_t registers[] = {a, b, c, d, e, f};                                                                 \
    return refuse(#NAME, PARAMETERS, registers);                                                                     \
  }                                                                                                                  \
  extern "C" __attribute__((visibility("default"), weak)) int NAME() { return kNoKernel; }
#include "refused.inc"
