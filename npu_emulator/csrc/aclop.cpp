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
  std::map<std::string, Ints> lists;  // the others are read by no operator here
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

Tensor memory_of(const aclTensorDesc& description, const aclDataBuffer& buffer, const Ints& dims) {
  return at::from_blob(buffer.data, dims, at::TensorOptions().dtype(scalar_type(description.dtype)));
}

// The work of Identity, which also changes a format; empty where one of the formats is not known.
std::function<void()> identity(const aclTensorDesc& in, const aclDataBuffer& from, const aclTensorDesc& out,
                               const aclDataBuffer& to) {
  const bool from_plain = is_plain(in.format), to_plain = is_plain(out.format);
  if (in.format == out.format || (from_plain && to_plain))
    return [=] { std::memmove(to.data, from.data, std::min(from.bytes, to.bytes)); };
  const auto private_format = from_plain ? out.format : in.format;
  const bool in_tiles = private_format == ACL_FORMAT_FRACTAL_NZ;
  if (from_plain == to_plain || !(in_tiles || private_format == ACL_FORMAT_NC1HWC0)) return {};
  if (to_plain)
    return [=] {
      const HostKernels guard;
      const auto plain = memory_of(out, to, out.plain), stored = memory_of(in, from, in.dims);
      plain.copy_(in_tiles ? from_tiles(stored, plain.size(-2), plain.size(-1)).reshape(plain.sizes())
                           : from_channel_blocks(stored, plain.sizes()));
    };
  return [=] {
    const HostKernels guard;
    (in_tiles ? to_tiles : to_channel_blocks)(memory_of(in, from, in.plain), memory_of(out, to, out.dims));
  };
}

// Tensors of a call. Numbers lie on the host, which may have given their memory to others when the operator runs.
Tensors memories(int count, const aclTensorDesc* const descriptions[], const aclDataBuffer* const buffers[]) {
  Tensors all;
  for (int index = 0; index < count; ++index) {
    if (!buffers[index]->data) {
      const auto& dims = descriptions[index]->plain;
      const bool is_empty = std::find(dims.begin(), dims.end(), 0) != dims.end();  // and not one that was not given
      all.push_back(is_empty ? at::empty(dims, scalar_type(descriptions[index]->dtype)) : Tensor());
      continue;
    }
    const auto seen = memory_of(*descriptions[index], *buffers[index], descriptions[index]->plain);
    all.push_back(may_run_later() && !is_on_device(buffers[index]->data) ? seen.clone() : seen);
  }
  return all;
}

bool all_plain(int count, const aclTensorDesc* const* descriptions) {
  return std::all_of(descriptions, descriptions + count, [](const auto* each) { return is_plain(each->format); });
}

}  // namespace

CANN_API aclError aclopCompileAndExecute(const char* name, int inputs, const aclTensorDesc* const in_descriptions[],
                                         const aclDataBuffer* const in[], int outputs,
                                         const aclTensorDesc* const out_descriptions[], aclDataBuffer* const out[],
                                         const aclopAttr* attributes, aclopEngineType, aclopCompileType, const char*,
                                         aclrtStream stream) {
  if (std::string(name) == "Identity" && inputs > 0 && outputs == 1) {
    auto work = identity(*in_descriptions[0], *in[0], *out_descriptions[0], *out[0]);
    if (work) {
      submit(stream, "Identity", std::move(work));
      return ACL_SUCCESS;
    }
  }
  const auto* found = named_operator(name);
  if (found && all_plain(inputs, in_descriptions) && all_plain(outputs, out_descriptions)) {
    try {
      const HostKernels guard;
      NamedCall call{memories(inputs, in_descriptions, in), memories(outputs, out_descriptions, out), {}, {}};
      if (attributes) call.attributes = attributes->numbers, call.lists = attributes->lists;
      submit(stream, found->name, [run = found->run, call = std::move(call)] {
        const HostKernels guard;
        run(call);
      });
      return ACL_SUCCESS;
    } catch (const c10::Error& error) {
      return fail(ACL_ERROR_INVALID_PARAM, std::string(name) + ": " + error.what_without_backtrace());
    }
  }
  return fail(kOpNotFound, std::string("the aclop operator ") + name + " is not emulated; its inputs are " +
                               described(inputs, in_descriptions) + ", its results " +
                               described(outputs, out_descriptions));
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
CANN_API aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
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
