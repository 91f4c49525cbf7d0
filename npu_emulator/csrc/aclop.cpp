// The older interface, operators by name: what torch_npu still moves data with, which is also how it changes the format
// of a tensor, and those of named_operators.cpp. All else is refused by name.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "formats.h"
#include "named_operators.h"
#include <acl/acl_op_compiler.h>

using namespace cann;

struct aclTensorDesc {
  aclDataType dtype;
  aclFormat format;
  std::vector<int64_t> dims;   // of the memory
  std::vector<int64_t> plain;  // of the tensor
};
struct aclDataBuffer {
  void* data;
  size_t bytes;
};
struct aclopAttr {
  std::map<std::string, double> numbers;
  std::map<std::string, Ints> lists;
  std::map<std::string, std::string> words;  // the others are read by no operator here
};

namespace {

constexpr int kOpNotFound = ACL_ERROR_OP_NOT_FOUND;

std::string described(int count, const aclTensorDesc* const* descriptions) {
  std::string text;
  for (int index = 0; index < count; ++index) {
    const auto& tensor = *descriptions[index];
    text += (index ? ", [" : "[");
    for (const auto size : tensor.dims) text += std::to_string(size) + ",";
    text += "] of aclDataType " + std::to_string(tensor.dtype) + " in aclFormat " + std::to_string(tensor.format);
  }
  return text;
}

// Whole numbers without a sign, which torch has no operators for, are seen as those with one.
Tensor memory_of(const aclTensorDesc& description, const aclDataBuffer& buffer, const Ints& dims) {
  const auto dtype = description.dtype == ACL_UINT64 ? at::kLong : scalar_type(description.dtype);
  return at::from_blob(buffer.data, dims, at::TensorOptions().dtype(dtype));
}

// A tensor of a call: its memory, undefined where there is none, and how it lies there.
struct Stored {
  Tensor memory;
  aclFormat format;
  Ints shape;

  bool is_private() const { return memory.defined() && !is_plain(format); }
};

// Numbers lie on the host, which may have given their memory to others when the operator runs.
std::vector<Stored> stored(int count, const aclTensorDesc* const descriptions[], const aclDataBuffer* const buffers[]) {
  std::vector<Stored> all;
  for (int index = 0; index < count; ++index) {
    const auto& given = *descriptions[index];
    const auto& buffer = *buffers[index];
    const bool is_empty = std::find(given.plain.begin(), given.plain.end(), 0) != given.plain.end();
    Tensor memory;  // which is none where a tensor was not given, unless it has no elements
    if (buffer.data) memory = memory_of(given, buffer, is_plain(given.format) ? given.plain : given.dims);
    else if (is_empty) memory = at::empty(given.plain, scalar_type(given.dtype));
    if (buffer.data && may_run_later() && !is_on_device(buffer.data)) memory = memory.clone();
    all.push_back({std::move(memory), buffer.data ? given.format : ACL_FORMAT_ND, given.plain});
  }
  return all;
}

NamedCall call_with(const aclopAttr* attributes) {
  if (!attributes) return {};
  return {{}, {}, attributes->numbers, attributes->lists, attributes->words};
}

Tensors in_plain_order(const std::vector<Stored>& stored) {
  Tensors all;
  for (const auto& each : stored)
    all.push_back(each.is_private() ? from_memory(each.memory, each.format, each.shape) : each.memory);
  return all;
}

// Runs an operator on tensors in plain order, whatever the formats of its arguments are.
void run_plainly(const NamedOperator& operation, NamedCall call, const std::vector<Stored>& in,
                 const std::vector<Stored>& out) {
  const HostKernels guard;
  call.in = in_plain_order(in);
  for (const auto& each : out)
    call.out.push_back(each.is_private() ? at::empty(each.shape, each.memory.options()) : each.memory);
  operation.run(call);
  for (size_t index = 0; index < out.size(); ++index)
    if (out[index].is_private()) to_memory(call.out[index], out[index].memory, out[index].format);
}

// Identity moves bytes where the format stays the same, and else changes it.
bool moves_bytes(const std::string& name, const aclTensorDesc& in, const aclTensorDesc& out) {
  return name == "Identity" && (in.format == out.format || (is_plain(in.format) && is_plain(out.format)));
}

bool has_known_formats(int count, const aclTensorDesc* const* descriptions) {
  return std::all_of(descriptions, descriptions + count, [](const auto* each) { return is_known(each->format); });
}

aclError refuse(const std::string& name, const std::string& inputs, const std::string& results) {
  return fail(kOpNotFound, "the aclop operator " + name + " is not emulated; its inputs are " + inputs +
                               ", its results " + results);
}

}  // namespace

CANN_API aclError aclopCompileAndExecute(const char* name, int inputs, const aclTensorDesc* const in_descriptions[],
                                         const aclDataBuffer* const in[], int outputs,
                                         const aclTensorDesc* const out_descriptions[], aclDataBuffer* const out[],
                                         const aclopAttr* attributes, aclopEngineType, aclopCompileType, const char*,
                                         aclrtStream stream) {
  if (inputs > 0 && outputs > 0 && moves_bytes(name, *in_descriptions[0], *out_descriptions[0])) {
    submit(stream, "Identity", [from = *in[0], to = *out[0]] {
      std::memmove(to.data, from.data, std::min(from.bytes, to.bytes));
    });
    return ACL_SUCCESS;
  }
  const auto* found = named_operator(name);
  if (found && has_known_formats(inputs, in_descriptions) && has_known_formats(outputs, out_descriptions)) {
    try {
      const HostKernels guard;
      submit(stream, found->name,
             [found, call = call_with(attributes), ins = stored(inputs, in_descriptions, in),
              outs = stored(outputs, out_descriptions, out)] { run_plainly(*found, call, ins, outs); });
      return ACL_SUCCESS;
    } catch (const c10::Error& error) {
      return fail(ACL_ERROR_INVALID_PARAM, std::string(name) + ": " + error.what_without_backtrace());
    }
  }
  return refuse(name, described(inputs, in_descriptions), described(outputs, out_descriptions));
}

// For operators whose results have sizes that depend on values: there is room for the largest, and the descriptions say
// afterwards what is there. Nothing else is asked for so.
CANN_API aclError aclopCompileAndExecuteV2(const char* name, int inputs, aclTensorDesc* in_descriptions[],
                                           aclDataBuffer* in[], int outputs, aclTensorDesc* out_descriptions[],
                                           aclDataBuffer* out[], aclopAttr* attributes, aclopEngineType,
                                           aclopCompileType, const char*, aclrtStream stream) {
  const auto* found = sized_operator(name);
  if (!found || !has_known_formats(inputs, in_descriptions))
    return refuse(name, described(inputs, in_descriptions), described(outputs, out_descriptions));
  if (const auto refused = aclrtSynchronizeStream(stream)) return refused;
  try {
    const HostKernels guard;
    auto call = call_with(attributes);
    call.in = in_plain_order(stored(inputs, in_descriptions, in));
    const auto results = found->run(call);
    for (int index = 0; index < outputs; ++index) {
      const auto& result = results.at(index);
      if (!result.defined() || !out[index]->data) continue;
      const auto width = c10::elementSize(scalar_type(out_descriptions[index]->dtype));
      const auto bytes = static_cast<size_t>(result.numel()) * width;
      TORCH_CHECK(bytes <= out[index]->bytes, "the output buffer is too small for a result of shape ", result.sizes());
      const Ints shape = result.sizes().vec();
      if (result.numel()) memory_of(*out_descriptions[index], *out[index], shape).copy_(result);
      out_descriptions[index]->dims = out_descriptions[index]->plain = shape;
    }
    return ACL_SUCCESS;
  } catch (const c10::Error& error) {
    return fail(ACL_ERROR_INVALID_PARAM, std::string(name) + ": " + error.what_without_backtrace());
  }
}

CANN_API aclTensorDesc* aclCreateTensorDesc(aclDataType dtype, int dims, const int64_t* sizes, aclFormat format) {
  return new aclTensorDesc{dtype, format, {sizes, sizes + dims}, {sizes, sizes + dims}};
}
CANN_API void aclDestroyTensorDesc(const aclTensorDesc* description) { delete description; }
CANN_API aclDataType aclGetTensorDescType(const aclTensorDesc* description) { return description->dtype; }
CANN_API aclFormat aclGetTensorDescFormat(const aclTensorDesc* description) { return description->format; }
CANN_API size_t aclGetTensorDescNumDims(const aclTensorDesc* description) { return description->dims.size(); }
CANN_API aclError aclGetTensorDescDimV2(const aclTensorDesc* description, size_t index, int64_t* size) {
  if (index >= description->dims.size())
    return fail(ACL_ERROR_INVALID_PARAM, "aclGetTensorDescDimV2: no such dimension");
  *size = description->dims[index];
  return ACL_SUCCESS;
}
CANN_API void aclSetTensorDescName(aclTensorDesc*, const char*) {}
CANN_API aclError aclSetTensorFormat(aclTensorDesc* description, aclFormat format) {
  description->format = format;
  return ACL_SUCCESS;
}
CANN_API aclError aclSetTensorShape(aclTensorDesc* description, int dims, const int64_t* sizes) {
  description->dims.assign(sizes, sizes + dims);
  return ACL_SUCCESS;
}
CANN_API aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
CANN_API aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{data, bytes}; }
CANN_API aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

CANN_API aclopAttr* aclopCreateAttr() { return new aclopAttr(); }
CANN_API void aclopDestroyAttr(const aclopAttr* attributes) { delete attributes; }
CANN_API aclError aclopSetAttrBool(aclopAttr* attributes, const char* name, uint8_t value) {
  attributes->numbers[name] = value;
  return ACL_SUCCESS;
}
CANN_API aclError aclopSetAttrInt(aclopAttr* attributes, const char* name, int64_t value) {
  attributes->numbers[name] = value;
  return ACL_SUCCESS;
}
CANN_API aclError aclopSetAttrFloat(aclopAttr* attributes, const char* name, float value) {
  attributes->numbers[name] = value;
  return ACL_SUCCESS;
}
CANN_API aclError aclopSetAttrString(aclopAttr* attributes, const char* name, const char* value) {
  attributes->words[name] = value;
  return ACL_SUCCESS;
}
CANN_API aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
CANN_API aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
CANN_API aclError aclopSetAttrListInt(aclopAttr* attributes, const char* name, int count, const int64_t* values) {
  attributes->lists[name].assign(values, values + count);
  return ACL_SUCCESS;
}
CANN_API aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
CANN_API aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) {
  return ACL_SUCCESS;
}

// Options of the compiler of operators; there is none, and what is set is what is read.
CANN_API aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
CANN_API size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof "disable"; }
CANN_API aclError aclGetCompileopt(aclCompileOpt, char* value, size_t bytes) {
  if (bytes < sizeof "disable") return fail(ACL_ERROR_INVALID_PARAM, "aclGetCompileopt: the buffer is too small");
  std::memcpy(value, "disable", sizeof "disable");
  return ACL_SUCCESS;
}
