// Declarations for every file of emulated operators: CANN's argument objects, their views as tensors of the host, and
// OP(), which turns a lambda with ATen parameters into the two C functions of an aclnn operator.
//
// An aclnn operator is called in two steps. aclnnXGetWorkspaceSize(arguments..., &bytes, &executor) takes the
// arguments; aclnnX(workspace, bytes, executor, stream) does the work. The C types of the first follow from the
// lambda's parameters, so that an operator is one entry here:
//
//     OP(Add, [](Tensor self, Tensor other, Scalar alpha, Tensor out) { put(out, at::add(self, other, alpha)); })
//
// A wrong type would silently be read from the wrong register: tests compare every entry with op-plugin's calls.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime.h"

struct aclTensor {
  std::vector<int64_t> dims, strides;
  int64_t offset;  // in elements
  aclDataType dtype;
  aclFormat format;
  void* data;
  std::vector<int64_t> storage;  // of a private format, the shape of its memory
};
struct aclScalar {
  aclDataType dtype;
  alignas(16) char bytes[16];  // as any of its types may lie
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> values;
};
struct aclScalarList {
  std::vector<const aclScalar*> values;
};
struct aclOpExecutor {
  const char* name;
  std::function<void()> run;
};

namespace cann {

using at::Scalar;
using at::Tensor;
using Ints = std::vector<int64_t>;
using Floats = std::vector<float>;
using Bools = std::vector<bool>;
using Tensors = std::vector<Tensor>;
using Scalars = std::vector<Scalar>;
using MaybeScalar = std::optional<Scalar>;

// Throws for a type that torch does not have.
at::ScalarType scalar_type(int acl_dtype);
// Throws for a private format: its memory must not be read as if it were in plain order.
Tensor view(const aclTensor* tensor);
// The elements of a tensor in NZ, in plain order. Throws for other private formats, and for a part of a tensor.
Tensor plain_copy(const aclTensor& tensor);
Scalar value(const aclScalar* scalar);

struct DType {
  int code;
  operator at::ScalarType() const { return scalar_type(code); }
};

// A result whose shape depends on values: torch_npu makes room for the largest and then asks for the shape.
struct Dynamic {
  aclTensor* raw;
  void fill(const Tensor& result) const;
};

// A matrix that is only read, and that may lie in memory in NZ. It is read when the operator runs.
struct Weight {
  Tensor plain;
  std::optional<aclTensor> tiles;
  operator Tensor() const { return tiles ? plain_copy(*tiles) : plain; }
};
Weight weight(const aclTensor* tensor);
using Weights = std::vector<Weight>;

// The C type of a parameter, its name in the table of calls, and how it is read.
template <class T>
struct Abi;
#define CANN_PLAIN_ABI(TYPE, NAME)                 \
  template <>                                      \
  struct Abi<TYPE> {                               \
    using C = TYPE;                                \
    static constexpr const char* name = NAME;      \
    static TYPE from(TYPE given) { return given; } \
  };
CANN_PLAIN_ABI(bool, "bool")
CANN_PLAIN_ABI(int8_t, "int8")
CANN_PLAIN_ABI(int32_t, "int32")
CANN_PLAIN_ABI(int64_t, "int64")
CANN_PLAIN_ABI(uint64_t, "uint64")
CANN_PLAIN_ABI(float, "float")
CANN_PLAIN_ABI(double, "double")
#undef CANN_PLAIN_ABI

#define CANN_ABI(TYPE, CTYPE, NAME, EXPRESSION)      \
  template <>                                        \
  struct Abi<TYPE> {                                 \
    using C = CTYPE;                                 \
    static constexpr const char* name = NAME;        \
    static TYPE from(C given) { return EXPRESSION; } \
  };
template <class List, class Read>
auto read_list(const List* list, Read read) {
  std::vector<decltype(read(nullptr))> result;
  if (list)
    for (const auto* element : list->values) result.push_back(read(element));
  return result;
}
CANN_ABI(Tensor, const aclTensor*, "Tensor", view(given))
CANN_ABI(Weight, const aclTensor*, "Tensor", weight(given))
CANN_ABI(Dynamic, const aclTensor*, "Tensor", Dynamic{const_cast<aclTensor*>(given)})
CANN_ABI(Scalar, const aclScalar*, "Scalar", value(given))
CANN_ABI(MaybeScalar, const aclScalar*, "Scalar", given ? MaybeScalar(value(given)) : std::nullopt)
CANN_ABI(Ints, const aclIntArray*, "IntArray", given ? given->values : Ints())
CANN_ABI(Floats, const aclFloatArray*, "FloatArray", given ? given->values : Floats())
CANN_ABI(Bools, const aclBoolArray*, "BoolArray", given ? given->values : Bools())
CANN_ABI(Tensors, const aclTensorList*, "TensorList", read_list(given, &view))
CANN_ABI(Weights, const aclTensorList*, "TensorList", read_list(given, &weight))
CANN_ABI(Scalars, const aclScalarList*, "ScalarList", read_list(given, &value))
CANN_ABI(DType, int, "DataType", DType{given})
CANN_ABI(std::string, const char*, "char*", given ? given : "")
#undef CANN_ABI

// How a tensor must go with others, whose parameters `others` has a bit for each of.
enum class Agreement { kShape, kBroadcasts, kBroadcastOf, kDtype };
struct Relation {
  Agreement agreement;
  uint64_t others;
};
// The demands of an operator's document on one parameter: documented_rules.txt, which extract_rules.py explains.
struct Demand {
  const char* name;
  uint64_t dtypes;  // a bit for each aclDataType that is allowed
  uint32_t ranks;   // a bit for each number of dimensions
  bool required, contiguous;
  const char* values;  // of a number or a string: "0,2", "1..65535", "0..", "BSH,TND"; empty demands nothing
  const Relation* relations;
  int related;  // how many relations
};
// An argument that the kernel would not take: CANN's code, and its words.
struct Refused : std::runtime_error {
  int code;
  Refused(int code, const std::string& words) : std::runtime_error(words), code(code) {}
};
// Whether this process is one of those that compute in float32 what kernels of 16 bits do: NPU_EMULATOR_STRICT=float32.
bool reference_runs();
// An argument of a call, as the demands on it see it.
struct Argument {
  enum class Kind : char { kTensor, kTensorList, kText, kNumber, kOther };
  Kind kind;
  union {
    const aclTensor* tensor;
    const aclTensorList* tensors;
    const char* text;
    int64_t number;
  };
  Argument(const aclTensor* given) : kind(Kind::kTensor), tensor(given) {}
  Argument(const aclTensorList* given) : kind(Kind::kTensorList), tensors(given) {}
  Argument(const char* given) : kind(Kind::kText), text(given) {}
  template <class Other>
  Argument(Other given) : kind(std::is_integral_v<Other> ? Kind::kNumber : Kind::kOther), number(0) {
    if constexpr (std::is_integral_v<Other>) number = static_cast<int64_t>(given);
  }
};
// An operator, and what its document and its sources say of it, which is looked up at its first call in strict mode.
struct Operator {
  const char* name = nullptr;
  std::once_flag looked_up;
  const Demand* demands = nullptr;
  bool has_relations = false, is_on_this_chip = false;
};
// In strict mode, throws Refused where the chip has no such operator, or its document forbids an argument.
void check_call(Operator& called, std::initializer_list<Argument> given);
// CANN's code for the exception that is being handled, whose words the next aclGetRecentErrMsg gives.
int failed_call(const char* operator_name);
// Further demands of documents, on sizes, values and several parameters together; operators call these functions. Each
// throws in strict mode only: `words` continue after "Tensor x", or whatever `parameter` is.
bool is_strict();
void demand_that(bool holds, const char* parameter, const char* words);
void demand_value(bool holds, const char* parameter, const std::string& words, int64_t given);
void demand_type_of(const Tensor& other, const char* other_parameter, const Tensor& given, const char* parameter);
void demand_16_bits(const Tensor& given, const char* parameter);  // or float32, in reference runs
void demand_int32(const Tensor& given, const char* parameter);

// No autograd, no modes of the caller's thread, and the same in that thread and in the queue's.
class HostKernels {
 public:
  HostKernels();
  ~HostKernels();

 private:
  c10::InferenceMode inference_;
  c10::impl::ExcludeDispatchKeyGuard modes_;
};

// Which operators are written, with the types of their parameters in order: "aclnnAdd" -> "Tensor Tensor Scalar Tensor".
std::map<std::string, std::string>& signatures();
void add_signature(const char* operator_name, std::initializer_list<const char*> types);

int execute(void* workspace, uint64_t bytes, aclOpExecutor* executor, void* stream);

// The kinds of operators. What is checked reports shapes that do not fit where the caller is, and not from the queue.
struct Plain {
  static constexpr bool is_checked = false;
};
struct Checked {
  static constexpr bool is_checked = true;
};
template <class... Rest>
void check_in_place(const Tensor& self, const Tensor& other, const Rest&...) {
  const auto shape = at::infer_size(self.sizes(), other.sizes());
  TORCH_CHECK(self.sizes() == shape, "output with shape ", self.sizes(), " doesn't match the broadcast shape ", shape);
}
template <class... Rest>
void check_in_place(const Tensor&, const Rest&...) {}
inline void keep(Plain, const char* name, std::function<void()> run, void** executor) {
  *executor = new aclOpExecutor{name, std::move(run)};
}
inline void keep(Checked, const char* name, std::function<void()> run, void** executor) {
  keep(Plain(), name, std::move(run), executor);
}

// A call with its arguments. Operators with the same parameters share this code; what follows is compiled once for each.
template <class... Arguments>
__attribute__((noinline)) std::function<void()> bound_call(void (*body)(Arguments...),
                                                           typename Abi<Arguments>::C... given) {
  return [body, arguments = std::make_tuple(Abi<Arguments>::from(given)...)] {
    const HostKernels guard;
    std::apply(body, arguments);
  };
}

template <class Kind, class... Arguments>
struct Entry {
  static inline void (*body)(Arguments...);
  static inline Operator self;

  static int workspace(typename Abi<Arguments>::C... given, uint64_t* bytes, void** executor) {
    const HostKernels guard;
    try {
      *bytes = 0;
      check_call(self, {Argument(given)...});
      auto run = bound_call<Arguments...>(body, given...);
      if constexpr (Kind::is_checked) check_in_place(Abi<Arguments>::from(given)...);
      keep(Kind(), self.name, std::move(run), executor);
      return 0;
    } catch (...) {
      return failed_call(self.name);
    }
  }
};

template <class Kind, class... Arguments>
void* define(const char* name, void (*body)(Arguments...)) {
  using Own = Entry<Kind, Arguments...>;
  Own::body = body;
  Own::self.name = name;
  add_signature(name, {Abi<Arguments>::name...});
  return reinterpret_cast<void*>(&Own::workspace);
}

// Results. The shape must be the one that torch_npu made room for.
inline void put(const Tensor& out, const Tensor& result) {
  if (!out.defined()) return;
  TORCH_CHECK(out.sizes() == result.sizes(), "the result of shape ", result.sizes(), " does not fit into ", out.sizes());
  out.copy_(result);
}
inline void demand_as_many(size_t given, size_t results) {
  TORCH_CHECK(given == results, "lists of ", given, " and ", results, " tensors or scalars do not go together");
}
inline void put(const Tensors& out, const Tensors& results) {
  demand_as_many(out.size(), results.size());
  for (size_t index = 0; index < out.size(); ++index) put(out[index], results[index]);
}
// Results of in-place operators must fit the type of the tensor, as torch itself demands.
inline void put_back(const Tensor& self, const Tensor& result) {
  TORCH_CHECK(at::canCast(result.scalar_type(), self.scalar_type()), "result type ", result.scalar_type(),
              " can't be cast to the desired output type ", self.scalar_type());
  put(self, result);
}
// How often `part` goes into `whole`; throws where it does not.
inline int64_t quotient(int64_t whole, int64_t part) {
  TORCH_CHECK(part > 0 && whole % part == 0, whole, " cannot be divided into parts of ", part);
  return whole / part;
}
// How many blocks of so many tokens are begun.
inline int64_t blocks_for(int64_t tokens, int64_t block_size) {
  TORCH_CHECK(block_size > 0, "blocks of ", block_size, " tokens");
  return (tokens + block_size - 1) / block_size;
}
// For kernels of ATen that trust their caller.
inline void demand_same_shape(const Tensor& given, const Tensor& self) {
  TORCH_CHECK(given.sizes() == self.sizes(), "shapes ", given.sizes(), " and ", self.sizes(), " differ");
}
// The two halves of a tensor along a dimension; torch's chunk gives one of them alone where there is one element.
inline std::pair<Tensor, Tensor> halves_of(const Tensor& tensor, int64_t dim) {
  TORCH_CHECK(tensor.size(dim) % 2 == 0, "dimension ", dim, " of shape ", tensor.sizes(), " has no halves");
  const auto half = tensor.size(dim) / 2;
  return {tensor.narrow(dim, 0, half), tensor.narrow(dim, half, half)};
}
// Random numbers from the seed and the offset that torch_npu's generator gives.
inline at::Generator generator(uint64_t seed, uint64_t offset) {
  constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;  // spreads seeds that differ by little
  return at::detail::createCPUGenerator(seed * kGoldenRatio + offset);
}
inline void refuse_given(const char* name, const Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || !tensor.numel(), name, " is not emulated");
}
inline std::optional<Tensor> maybe(const Tensor& tensor) {
  return tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt;
}
// The precision in which fused kernels compute: they round once, when the result is stored.
inline Tensor wide(const Tensor& tensor) {
  return !tensor.defined() || tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}
// An operand of what computes with numbers of 16 bits in float32 and rounds once: products of matrices, losses, variances.
inline Tensor operand(const Tensor& tensor) {
  return tensor.defined() && at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}
// The first bits of a mask of dropout, from the lowest of each byte.
inline Tensor unpacked_bits(const Tensor& bytes, int64_t count) {
  const auto bits = bytes.flatten().unsqueeze(1).bitwise_right_shift(at::arange(8, at::kByte)).bitwise_and(1);
  return bits.flatten().narrow(0, 0, count).to(at::kBool);
}
inline Ints whole_numbers(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto list = tensor.to(at::kLong).contiguous();
  return {list.data_ptr<int64_t>(), list.data_ptr<int64_t>() + list.numel()};
}

}  // namespace cann

// A C symbol whose type only the compiler knows: a jump through a slot leaves all arguments where they are.
#if defined(__x86_64__)
#define CANN_JUMP(SYMBOL, SLOT) \
  asm(".text\n.globl " #SYMBOL "\n.type " #SYMBOL ",@function\n" #SYMBOL ":\n jmp *" #SLOT "(%rip)\n");
#elif defined(__aarch64__)
#define CANN_JUMP(SYMBOL, SLOT)                                                                                   \
  asm(".text\n.globl " #SYMBOL "\n.type " #SYMBOL ",@function\n" #SYMBOL ":\n adrp x16, " #SLOT "\n ldr x16, [x16, " \
      ":lo12:" #SLOT "]\n br x16\n");
#endif
#define CANN_FUNCTION(KIND, EXECUTE, NAME, ...)                                                               \
  struct Kind_##NAME : KIND {};                                                                              \
  extern "C" {                                                                                               \
  __attribute__((visibility("hidden"), used)) void* first_##NAME = cann::define<Kind_##NAME>(#NAME, +__VA_ARGS__); \
  __attribute__((visibility("hidden"), used)) void* second_##NAME = reinterpret_cast<void*>(&EXECUTE);       \
  }                                                                                                          \
  CANN_JUMP(NAME##GetWorkspaceSize, first_##NAME) CANN_JUMP(NAME, second_##NAME)
#define OP(NAME, ...) CANN_FUNCTION(cann::Plain, cann::execute, aclnn##NAME, __VA_ARGS__)
#define CHECKED_OP(NAME, ...) CANN_FUNCTION(cann::Checked, cann::execute, aclnn##NAME, __VA_ARGS__)
