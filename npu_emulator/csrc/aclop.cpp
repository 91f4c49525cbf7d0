// The older interface, operators by name: what torch_npu still moves data with, which is also how it changes the format
// of a tensor, and few others. All else is refused by name.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "formats.h"
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
  const bool reads_tiles = in.format == ACL_FORMAT_FRACTAL_NZ, writes_tiles = out.format == ACL_FORMAT_FRACTAL_NZ;
  if ((reads_tiles && writes_tiles) || (is_plain(in.format) && is_plain(out.format)))
    return [=] { std::memmove(to.data, from.data, std::min(from.bytes, to.bytes)); };
  if (reads_tiles && is_plain(out.format))
    return [=] {
      const HostKernels guard;
      const auto plain = memory_of(out, to, out.plain);
      plain.copy_(from_tiles(memory_of(in, from, in.dims), plain.size(-2), plain.size(-1)).reshape(plain.sizes()));
    };
  if (writes_tiles && is_plain(in.format))
    return [=] {
      const HostKernels guard;
      to_tiles(memory_of(in, from, in.plain), memory_of(out, to, out.dims));
    };
  return {};
}

struct NamedCall {
  Tensors in, out;
  std::map<std::string, double> attributes;
  std::map<std::string, Ints> lists;
};

// Round to the nearest, then add the offset; the type of the result says how far numbers reach.
void quantize(const NamedCall& call) {
  const auto& in = call.in;
  auto values = at::round(wide(in.at(0)) / wide(in.at(1)));
  if (in.size() > 2 && in.at(2).defined()) values = values + in.at(2);
  if (call.out.at(0).scalar_type() == at::kChar) values = values.clamp(-128, 127);
  else if (call.out.at(0).scalar_type() == at::kByte) values = values.clamp(0, 255);
  put(call.out.at(0), values);
}

void fast_gelu(const NamedCall& call) {
  const auto x = wide(call.in.at(0));
  put(call.out.at(0), x * at::sigmoid(1.702 * x));
}

// What is hidden in scores: a triangle, or what the mask says.
Tensor hidden_scores(const NamedCall& call, const Tensor& mask) {
  const auto& scores = call.out.at(0);
  if (!call.attributes.at("fixed_triu_mask")) return mask.to(at::kBool);
  return at::ones({scores.size(-2), scores.size(-1)}, at::kBool).triu(1);
}
void scaled_masked_softmax(const NamedCall& call) {
  constexpr double kHidden = -10000;
  const auto scores = wide(call.in.at(0)) * call.attributes.at("scale");
  put(call.out.at(0), scores.masked_fill(hidden_scores(call, call.in.at(1)), kHidden).softmax(-1));
}
void scaled_masked_softmax_gradient(const NamedCall& call) {
  const auto product = wide(call.in.at(0)) * wide(call.in.at(1));
  const auto of_scores = product - wide(call.in.at(1)) * product.sum(-1, true);
  put(call.out.at(0), (of_scores * call.attributes.at("scale")).masked_fill(hidden_scores(call, call.in.at(2)), 0));
}

// The powers of beta1 and beta2 are those of the step before.
void apply_adam_w(const NamedCall& call) {
  TORCH_CHECK(!call.attributes.at("amsgrad"), "amsgrad is not emulated");
  const auto number = [&](size_t index) { return call.in.at(index).item<double>(); };
  const double rate = number(5), beta1 = number(7), beta2 = number(8);
  const double rest1 = 1 - number(3) * beta1, rest2 = 1 - number(4) * beta2;
  const auto gradient = call.attributes.at("maximize") ? -wide(call.in.at(10)) : wide(call.in.at(10));
  const auto mean = wide(call.in.at(1)) * beta1 + gradient * (1 - beta1);
  const auto square = wide(call.in.at(2)) * beta2 + gradient.square() * (1 - beta2);
  const auto step = mean / rest1 / ((square / rest2).sqrt() + number(9));
  put(call.out, {wide(call.in.at(0)) * (1 - rate * number(6)) - rate * step, mean, square});
}

// op-plugin writes infinity as the first or the last whole number of 32 bits.
double power(const NamedCall& call) {
  constexpr double kLargest = 2147483520;  // below these, and in float32
  const auto p = call.attributes.at("p");
  return std::abs(p) > kLargest ? std::copysign(INFINITY, p) : p;
}
// The first half of a norm: that of which the second takes the root.
void sum_of_powers(const NamedCall& call) {
  const auto p = power(call);
  const auto& dims = call.lists.at("axes");
  const bool keep = call.attributes.at("keepdim");
  const auto sizes = at::abs(call.in.at(0));
  if (std::isinf(p)) return put(call.out.at(0), p > 0 ? at::amax(sizes, dims, keep) : at::amin(sizes, dims, keep));
  put(call.out.at(0), at::sum(p == 0 ? (sizes != 0).to(sizes.scalar_type()) : at::pow(sizes, p), dims, keep));
}
void root_of_sum(const NamedCall& call) {
  const auto p = power(call);
  put(call.out.at(0), p == 0 || std::isinf(p) ? call.in.at(0) : at::pow(call.in.at(0), 1 / p));
}
void singular_values(const NamedCall& call) {
  if (!call.attributes.at("compute_uv")) return put(call.out.at(0), at::linalg_svdvals(call.in.at(0)));
  const auto [u, values, transposed_v] = at::linalg_svd(call.in.at(0), call.attributes.at("full_matrices"));
  put(call.out, {values, u, transposed_v.mT()});
}
void triangular_solution(const NamedCall& call) {
  const bool lower = call.attributes.at("lower"), transposed = call.attributes.at("adjoint");
  put(call.out.at(0),
      at::linalg_solve_triangular(transposed ? call.in.at(0).mT() : call.in.at(0), call.in.at(1), lower == transposed));
}
void powers_between(const NamedCall& call) {
  const auto& of = call.attributes;
  const auto options = call.out.at(0).options();
  put(call.out.at(0), at::logspace(of.at("start"), of.at("end"), call.in.at(0).numel(), of.at("base"), options));
}

// Both get each row of one beside each row of the other; a negative power stands for infinity.
double power_of_distance(const NamedCall& call) {
  const auto p = call.attributes.at("p");
  return p < 0 ? INFINITY : p;
}
void distances(const NamedCall& call) {
  put(call.out.at(0), at::linalg_vector_norm(call.in.at(0) - call.in.at(1), power_of_distance(call), {-1}));
}
void gradient_of_distances(const NamedCall& call) {
  const auto& in = call.in;
  put(call.out.at(0), at::_cdist_backward(in.at(0).select(-1, 0), in.at(1).select(-2, 0), in.at(2).select(-3, 0),
                                       power_of_distance(call), in.at(3).select(-1, 0)));
}

// The normalised tensor, and the mean and the reciprocal of the deviation of what was normalised together.
void layer_norm(const NamedCall& call) {
  const auto& in = call.in;
  const auto first = static_cast<size_t>(call.attributes.at("begin_norm_axis"));
  const auto [values, mean, deviation] = at::native_layer_norm(
      wide(in.at(0)), in.at(0).sizes().slice(first), wide(in.at(1)), wide(in.at(2)), call.attributes.at("epsilon"));
  put(call.out, {values, mean, deviation});
}

// A part of a tensor: in every dimension the first element, and how many.
void slice(const NamedCall& call) {
  const auto first = call.in.at(1).to(at::kLong), sizes = call.in.at(2).to(at::kLong);
  auto part = call.in.at(0);
  for (int64_t dim = 0; dim < part.dim(); ++dim)
    part = part.narrow(dim, first[dim].item<int64_t>(), sizes[dim].item<int64_t>());
  put(call.out.at(0), part);
}

// Operators that torch_npu has in this interface only.
const std::map<std::string, void (*)(const NamedCall&)> kNamed = {
    {"Quantize", &quantize},
    {"FastGelu", &fast_gelu},
    {"ScaledMaskedSoftmax", &scaled_masked_softmax},
    {"ScaledMaskedSoftmaxGrad", &scaled_masked_softmax_gradient},
    {"ApplyAdamW", &apply_adam_w},
    {"LayerNormV3", &layer_norm},
    {"LogSigmoid", [](const NamedCall& call) { put(call.out.at(0), at::log_sigmoid(call.in.at(0))); }},
    {"LpNormReduceV2", &sum_of_powers},
    {"LpNormUpdateV2", &root_of_sum},
    {"Svd", &singular_values},
    {"MatrixTriangularSolve", &triangular_solution},
    {"LogSpaceD", &powers_between},
    {"Cdist", &distances},
    {"CdistGrad", &gradient_of_distances},
    {"Slice", &slice},
    {"BitwiseXor", [](const NamedCall& call) { put(call.out.at(0), at::bitwise_xor(call.in.at(0), call.in.at(1))); }},
    {"LeftShift",
     [](const NamedCall& call) { put(call.out.at(0), at::bitwise_left_shift(call.in.at(0), call.in.at(1))); }},
    {"RightShift",
     [](const NamedCall& call) { put(call.out.at(0), at::bitwise_right_shift(call.in.at(0), call.in.at(1))); }},
};

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
  const auto found = kNamed.find(name);
  if (found != kNamed.end() && all_plain(inputs, in_descriptions) && all_plain(outputs, out_descriptions)) {
    try {
      const HostKernels guard;
      NamedCall call{memories(inputs, in_descriptions, in), memories(outputs, out_descriptions, out), {}, {}};
      if (attributes) call.attributes = attributes->numbers, call.lists = attributes->lists;
      submit(stream, found->first.c_str(), [run = found->second, call = std::move(call)] {
        const HostKernels guard;
        run(call);
      });
      return ACL_SUCCESS;
    } catch (const c10::Error& error) {
      return fail(ACL_ERROR_INVALID_PARAM, found->first + ": " + error.what_without_backtrace());
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
