#include "fallback.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "device.h"
#include "generator.h"
#include "graph.h"
#include "host_alias.h"
#include "memory.h"
#include "meters.h"
#include "recorder.h"

namespace npu {
namespace {

// What has to be known about an operator, worked out at its first call.
struct OperatorTraits {
  std::atomic<int64_t>* calls;
  c10::SmallVector<size_t, 1> optional_generators;  // positions of arguments
  bool writes;                                      // to one of its arguments
  bool takes_host_tensors;                          // beside tensors on the NPU
  bool multiplies;                                  // matrices
};

bool takes_host_tensors(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index",     "aten::index_put",          "aten::index_put_", "aten::_index_put_impl_",
      "aten::_ctc_loss", "aten::_unsafe_index",      "aten::copy_",      "aten::_pack_padded_sequence",
      "aten::set_",      "aten::_unsafe_index_put",
  };
  return names.count(name) > 0;
}

bool multiplies_matrices(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::mm",      "aten::addmm",    "aten::addmm_", "aten::bmm",   "aten::baddbmm", "aten::baddbmm_", "aten::addbmm",
      "aten::addbmm_", "aten::addmv",    "aten::addmv_", "aten::mv",    "aten::dot",     "aten::_addmm_activation",
  };
  return names.count(name) > 0;
}

bool is_optional_generator(const c10::TypePtr& type) {
  const auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

OperatorTraits describe(const c10::FunctionSchema& schema) {
  OperatorTraits traits{};
  const auto& overload = schema.overload_name();
  traits.calls = &meters::operator_calls(overload.empty() ? schema.name() : schema.name() + "." + overload);
  for (size_t position = 0; position < schema.arguments().size(); ++position) {
    const auto& argument = schema.arguments()[position];
    if (is_optional_generator(argument.type())) traits.optional_generators.push_back(position);
    traits.writes = traits.writes || (argument.alias_info() && argument.alias_info()->isWrite());
  }
  traits.takes_host_tensors = takes_host_tensors(schema.name());
  traits.multiplies = multiplies_matrices(schema.name());
  return traits;
}

const OperatorTraits& traits_of(const c10::FunctionSchema& schema) {
  thread_local std::unordered_map<const c10::FunctionSchema*, const OperatorTraits*> seen;
  auto& known = seen[&schema];
  if (known) return *known;
  static std::mutex mutex;
  static auto* all = new std::unordered_map<const c10::FunctionSchema*, OperatorTraits>();
  std::lock_guard<std::mutex> lock(mutex);
  known = &all->try_emplace(&schema, describe(schema)).first->second;
  return *known;
}

// Replaces the arguments of one call by what the CPU kernel takes, and finds out which die the call belongs to.
class HostArguments {
 public:
  explicit HostArguments(const c10::FunctionSchema& schema) : schema_(schema) {}

  void replace(c10::IValue& value) {
    if (value.isTensor()) {
      value = host_tensor(value.toTensor());
    } else if (value.isTensorList()) {
      value = host_list(value.toTensorList());
    } else if (value.isOptionalTensorList()) {
      value = host_optional_list(value.toOptionalTensorList());
    } else if (value.isDevice()) {
      replace_device(value);
    } else if (value.isGenerator()) {
      const auto generator = value.toGenerator();
      if (generator.defined() && generator.device().type() == kNpu) value = host_generator(generator);
    }
  }

  c10::DeviceIndex device() const { return device_ < 0 ? current_device() : device_; }
  bool result_stays_on_host() const { return result_stays_on_host_; }
  bool has_host_tensor() const { return has_host_tensor_; }  // other than a single number
  HostAliases& aliases() { return aliases_; }

  void check_same_device() const {
    TORCH_CHECK(!has_host_tensor_ || aliases_.empty(),
                "Expected all tensors to be on the same device, but found at least two devices, npu:",
                static_cast<int>(device()), " and cpu! (when checking arguments of ", schema_.name(), ")");
  }

 private:
  at::Tensor host_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      has_host_tensor_ = has_host_tensor_ || (tensor.device().is_cpu() && tensor.dim() > 0);
      return tensor;
    }
    const auto index = tensor.device().index();
    if (device_ < 0) device_ = index;
    TORCH_CHECK(index == device_, "Expected all tensors to be on the same device, but found at least two devices, npu:",
                static_cast<int>(device_), " and npu:", static_cast<int>(index), "! (when checking arguments of ",
                schema_.name(), ")");
    return aliases_.alias(tensor);
  }

  c10::List<at::Tensor> host_list(const c10::List<at::Tensor>& tensors) {
    c10::List<at::Tensor> host;
    host.reserve(tensors.size());
    for (const at::Tensor& each : tensors) host.push_back(host_tensor(each));
    return host;
  }

  c10::List<std::optional<at::Tensor>> host_optional_list(const c10::List<std::optional<at::Tensor>>& tensors) {
    c10::List<std::optional<at::Tensor>> host;
    host.reserve(tensors.size());
    for (const std::optional<at::Tensor> each : tensors)
      host.push_back(each ? std::optional<at::Tensor>(host_tensor(*each)) : std::nullopt);
    return host;
  }

  void replace_device(c10::IValue& value) {
    const auto device = value.toDevice();
    if (device.type() == kNpu) {
      if (device_ < 0) device_ = resolve_device(device.index());
      value = c10::Device(c10::kCPU);
    } else {
      result_stays_on_host_ = result_stays_on_host_ || device.is_cpu();
    }
  }

  const c10::FunctionSchema& schema_;
  HostAliases aliases_;
  c10::DeviceIndex device_ = -1;
  bool has_host_tensor_ = false;
  bool result_stays_on_host_ = false;
};

void results_to_device(torch::jit::Stack& stack, size_t count, HostArguments& arguments) {
  auto& aliases = arguments.aliases();
  for (size_t position = stack.size() - count; position < stack.size(); ++position) {
    auto& value = stack[position];
    if (value.isTensor()) {
      value = aliases.to_device(value.toTensor(), arguments.device());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      for (const at::Tensor& each : value.toTensorList())
        results.push_back(aliases.to_device(each, arguments.device()));
      value = std::move(results);
    }
  }
}

// Whether all tensors of a call hold numbers of 16 bits, and of one type.
bool is_in_16_bits(const torch::jit::Stack& stack, size_t first) {
  auto type = at::ScalarType::Undefined;
  for (auto position = first; position < stack.size(); ++position) {
    if (!stack[position].isTensor()) continue;
    const auto found = stack[position].toTensor().scalar_type();
    if (!at::isReducedFloatingType(found) || c10::elementSize(found) != 2) return false;
    if (type != at::ScalarType::Undefined && found != type) return false;
    type = found;
  }
  return type != at::ScalarType::Undefined;
}

// A product of matrices as a device computes it: in float32, and rounded once. The host's own kernels for 16 bits do the
// same, but where it has no AVX-512 they take ten times as long. What is widened is no memory of the die.
void multiply_in_32_bits(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t first) {
  const auto& parameters = op.schema().arguments();
  torch::jit::Stack wide(stack->begin() + first, stack->end());
  at::Tensor written, product;
  auto type = at::ScalarType::Undefined;
  {
    const ChargeScope host(-1);
    for (size_t position = 0; position < wide.size(); ++position) {
      if (!wide[position].isTensor()) continue;
      const auto tensor = wide[position].toTensor();
      type = tensor.scalar_type();
      if (parameters[position].alias_info() && parameters[position].alias_info()->isWrite()) written = tensor;
      wide[position] = parameters[position].is_out() ? at::empty({0}, at::kFloat) : tensor.to(at::kFloat);
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &wide);
    product = wide.back().toTensor();
  }
  if (written.defined()) at::native::resize_output(written, product.sizes());
  else written = at::empty(product.sizes(), type);
  written.copy_(product);
  stack->erase(stack->begin() + first, stack->end());
  stack->emplace_back(std::move(written));
}

void call_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool multiplies) {
  const auto first = stack->size() - op.schema().arguments().size();
  if (multiplies && is_in_16_bits(*stack, first)) return multiply_in_32_bits(op, stack, first);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack, HostArguments& arguments,
             const OperatorTraits& traits) {
  {
    const ChargeScope scope(arguments.result_stays_on_host() ? -1 : arguments.device());
    const recorder::Computing computing(op.schema().name(), arguments.device());
    call_kernel(op, stack, traits.multiplies);
  }
  if (traits.writes) arguments.aliases().write_back();
  if (!arguments.result_stays_on_host()) results_to_device(*stack, op.schema().returns().size(), arguments);
}

bool is_mask(const c10::IValue& value) {
  if (!value.isOptionalTensorList()) return false;
  for (const std::optional<at::Tensor> each : value.toOptionalTensorList())
    if (each && each->defined() && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte)) return true;
  return false;
}

// Whether the host has to see values to know what the operator gives: such a call cannot be part of a graph.
bool waits_for_values(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs) {
  const auto& name = op.schema().name();
  if (name.find("aten::index") == 0 || name.find("aten::_index_put") == 0 || name == "aten::_unsafe_index")
    return inputs.size() > 1 && is_mask(inputs[1]);
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

void refuse_in_graph(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs, HostArguments& arguments) {
  const auto& name = op.schema().name();
  if (waits_for_values(op, inputs)) graph::refuse(name + ", whose result the host has to wait for");
  if (arguments.has_host_tensor()) graph::refuse(name + " with a tensor of the host, which is copied to the die");
  if (arguments.result_stays_on_host() && !arguments.aliases().empty())
    graph::refuse(name + ", which gives its result to the host");
}

// The tensors of values, those of lists too.
std::vector<at::Tensor> tensors_of(const c10::IValue* values, size_t count) {
  std::vector<at::Tensor> tensors;
  for (auto value = values; value != values + count; ++value) {
    if (value->isTensor()) {
      tensors.push_back(value->toTensor());
    } else if (value->isTensorList()) {
      for (const at::Tensor& each : value->toTensorList()) tensors.push_back(each);
    }
  }
  return tensors;
}

// Computes and records: a replay calls the CPU kernel again, over the same memory.
void record_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack, HostArguments& arguments,
                    const OperatorTraits& traits) {
  const auto& schema = op.schema();
  std::vector<c10::IValue> inputs(stack->end() - schema.arguments().size(), stack->end());
  refuse_in_graph(op, inputs, arguments);
  auto& aliases = arguments.aliases();
  GraphCall call(schema.name());
  for (size_t position = 0; position < inputs.size(); ++position) {
    const auto* alias = schema.arguments()[position].alias_info();
    if (inputs[position].isGenerator()) graph::use_generator(inputs[position].toGenerator(), arguments.device());
    if (!alias || !alias->isWrite()) continue;
    for (const auto& each : tensors_of(&inputs[position], 1)) call.writes(aliases.device_of(each));
  }
  const auto older = aliases.storages();
  compute(op, stack, arguments, traits);
  if (op.hasTag(at::Tag::inplace_view)) return;
  const auto count = schema.returns().size();
  std::vector<at::Tensor> results;
  bool makes = traits.writes;
  for (const auto& made : tensors_of(stack->data() + stack->size() - count, count)) {
    const bool is_view = !made.defined() || !made.is_privateuseone() || aliases.among_first(older, made);
    results.push_back(is_view ? at::Tensor() : call.result(made));
    makes = makes || !is_view;
  }
  if (!makes) return;
  for (auto& each : inputs) each = call.operand(aliases.device_of(each));
  call.done([op, inputs = std::move(inputs), results = std::move(results), calls = traits.calls, count,
             multiplies = traits.multiplies, device = arguments.device()] {
    calls->fetch_add(1, std::memory_order_relaxed);
    torch::jit::Stack again(inputs);
    {
      const recorder::Computing computing(op.schema().name(), device);
      const graph::KernelScope scope;
      call_kernel(op, &again, multiplies);
    }
    graph::write_results(results, tensors_of(again.data() + again.size() - count, count), op.schema().name());
  });
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& traits = traits_of(schema);
  traits.calls->fetch_add(1, std::memory_order_relaxed);
  const auto first = stack->size() - schema.arguments().size();
  HostArguments arguments(schema);
  for (auto position = first; position < stack->size(); ++position) arguments.replace((*stack)[position]);
  if (!traits.takes_host_tensors) arguments.check_same_device();
  for (const auto position : traits.optional_generators) {
    auto& generator = (*stack)[first + position];
    if (generator.isNone()) generator = host_generator(default_generator(arguments.device()));
  }
  if (graph::recording()) return record_on_host(op, stack, arguments, traits);
  compute(op, stack, arguments, traits);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// Some operators come with a kernel that every device without one of its own inherits: structured operators with one
// that works out the shape, allocates and calls the variant that takes the output, normalisations and a few others with
// one made of smaller operators. The CPU kernel of the whole operator does the same in one call.
void route_inherited_operators() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, 0);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    const bool inherits = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                          op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    if (!inherits || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      continue;
    const auto full_name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

// Autograd formulas are written over dispatched operators, so none is needed for the NPU; without the fallthrough,
// operators that have no autograd kernel (collectives) would be refused.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace npu
