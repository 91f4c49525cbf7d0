// Operators that cannot or should not go through the fallback: allocation, copies, storage, views, convolution.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "device.h"
#include "graph.h"
#include "host_alias.h"
#include "memory.h"
#include "memory_pool.h"
#include "meters.h"
#include "recorder.h"

namespace npu {
namespace {

constexpr c10::DispatchKeySet kNpuKey(c10::DispatchKey::PrivateUse1);

c10::Device device_of(const std::optional<c10::Device>& device) {
  return {kNpu, resolve_device(device ? device->index() : -1)};
}

void count_allocation() {
  static auto& calls = meters::operator_calls("aten::empty");
  calls.fetch_add(1, std::memory_order_relaxed);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device_of(device));
  count_allocation();
  return at::Tensor(
      at::detail::empty_generic(size, device_allocator(), kNpuKey, c10::dtype_or_default(dtype), memory_format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device_of(device));
  count_allocation();
  return at::Tensor(
      at::detail::empty_strided_generic(size, stride, device_allocator(), kNpuKey, c10::dtype_or_default(dtype)));
}

// A tensor of zeros that has no memory.
at::Tensor efficient_zero_tensor(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                 std::optional<at::Device> device, std::optional<bool>) {
  at::native::ZeroTensorAllocator no_memory(device_of(device));
  return at::Tensor(at::detail::empty_generic(size, &no_memory, kNpuKey.add(c10::DispatchKey::ZeroTensor),
                                              c10::dtype_or_default(dtype), std::nullopt));
}

// The dimension along which elements are neighbours in memory; -1 if there is none.
int64_t dimension_of_neighbours(const at::Tensor& tensor) {
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension)
    if (tensor.size(dimension) > 1 && tensor.stride(dimension) == 1) return dimension;
  return -1;
}

meters::Copy direction_of(const at::Tensor& source, const at::Tensor& destination) {
  if (source.is_cpu()) return meters::Copy::kHostToDevice;
  return destination.is_cpu() ? meters::Copy::kDeviceToHost : meters::Copy::kDeviceToDevice;
}

void count_copy(meters::Copy direction, const at::Tensor& source, const at::Tensor& destination) {
  const auto bytes = static_cast<int64_t>(destination.nbytes());
  meters::count_copy(direction, bytes);
  if (direction == meters::Copy::kDeviceToDevice && source.dim() == destination.dim() &&
      dimension_of_neighbours(source) != dimension_of_neighbours(destination))
    meters::count_copy(meters::Copy::kTransposing, bytes);
}

bool same_layout(const at::Tensor& source, const at::Tensor& destination) {
  return source.dtype() == destination.dtype() && source.sizes() == destination.sizes() && source.is_contiguous() &&
         destination.is_contiguous() && source.is_neg() == destination.is_neg() &&
         source.is_conj() == destination.is_conj();
}

// Records a copy. One that is not in the order of the stream, or waits for it, cannot be part of a graph.
void record_copy(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  const auto direction = direction_of(source, destination);
  const bool to_die = direction == meters::Copy::kHostToDevice, to_host = direction == meters::Copy::kDeviceToHost;
  const std::string name = to_die ? "a copy to the die" : to_host ? "a copy to the host" : "aten::copy_";
  if ((to_die || to_host) && !non_blocking) graph::refuse(name + " that the host waits for");
  GraphCall call(name);
  const auto from = to_die ? call.pinned(source) : call.operand(source);
  const auto to = to_host ? call.pinned(destination) : call.result(destination);
  call.writes(destination);
  call.done([=] {
    count_copy(direction, from, to);
    const graph::KernelScope scope;
    to.copy_(from);
  });
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  refuse_after_fork();
  if (graph::recording()) {
    record_copy(source, destination, non_blocking);
    if (destination.is_cpu()) return destination;  // what the host sees is left alone until a replay
  }
  count_copy(direction_of(source, destination), source, destination);
  const recorder::Computing computing("aten::_copy_from",
                                      (source.is_cpu() ? destination : source).device().index());
  if (same_layout(source, destination)) {
    const auto bytes = destination.nbytes();
    for (const auto& tensor : {source, destination}) pool::refuse_absent(tensor.storage().data());
    if (bytes) std::memmove(destination.mutable_data_ptr(), source.const_data_ptr(), bytes);
    return destination;
  }
  HostAliases aliases;
  const auto host_source = source.is_privateuseone() ? aliases.alias(source) : source;
  auto host_destination = destination.is_privateuseone() ? aliases.alias(destination) : destination;
  host_destination.copy_(host_source);
  return destination;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  static auto& calls = meters::operator_calls("aten::_local_scalar_dense");
  calls.fetch_add(1, std::memory_order_relaxed);
  graph::refuse("Tensor.item()");
  meters::count_copy(meters::Copy::kDeviceToHost, self.element_size());
  return at::native::_local_scalar_dense_cpu(host_alias(self));
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  if (source.sizes() != destination.sizes()) destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> memory_format) {
  const c10::DeviceGuard guard(self.device());
  const auto bytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
  if (self.storage().nbytes() && bytes > self.storage().nbytes())
    graph::refuse("resize_ of a tensor that has content, which moves it");
  return at::native::resize_(self, size, memory_format);
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                           at::IntArrayRef stride) {
  const c10::DeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage_at(self, std::move(storage), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocate_on(self.device().index(), 0), device_allocator(),
                       /*resizable=*/true);
  return set_storage_at(self, std::move(storage), 0, {0}, {});
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// The CPU kernel takes no generator, so it would draw from that of the host.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

void record_stream(at::Tensor&, c10::Stream) {}

// Whether `data = other` may put an NPU tensor in the place of a CPU tensor, or the other way round.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return self.key_set() == from.key_set() || (dense(self) && dense(from));
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  HostAliases aliases;
  const at::AutoDispatchBelowAutograd below_autograd;
  const ChargeScope scope(input.device().index());
  const recorder::Computing computing("aten::convolution_overrideable", input.device().index());
  const bool has_bias = bias && bias->defined();
  const auto made = aliases.to_device(
      at::convolution(aliases.alias(input), aliases.alias(weight),
                      has_bias ? std::optional<at::Tensor>(aliases.alias(*bias)) : std::nullopt, stride, padding,
                      dilation, transposed, output_padding, groups),
      input.device().index());
  if (!graph::recording()) return made;
  GraphCall call("aten::convolution_overrideable");
  call.done([result = call.result(made), input = call.operand(input), weight = call.operand(weight),
             bias = has_bias ? std::optional<at::Tensor>(call.operand(*bias)) : std::nullopt, stride = stride.vec(),
             padding = padding.vec(), dilation = dilation.vec(), transposed, output_padding = output_padding.vec(),
             groups] {
    const graph::KernelScope scope;
    graph::write_results({result}, {at::convolution(input, weight, bias, stride, padding, dilation, transposed,
                                                    output_padding, groups)},
                         "aten::convolution_overrideable");
  });
  return made;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> output_mask) {
  HostAliases aliases;
  const at::AutoDispatchBelowAutograd below_autograd;
  const auto device = input.device().index();
  graph::refuse("aten::convolution_backward_overrideable, which is not emulated in a graph");
  const ChargeScope scope(device);
  const recorder::Computing computing("aten::convolution_backward_overrideable", device);
  const auto channels = grad_output.size(1);
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(
      aliases.alias(grad_output), aliases.alias(input), aliases.alias(weight),
      at::OptionalIntArrayRef(at::IntArrayRef(&channels, 1)), stride, padding, dilation, transposed, output_padding,
      groups, output_mask);
  return {aliases.to_device(grad_input, device), aliases.to_device(grad_weight, device),
          aliases.to_device(grad_bias, device)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_efficientzerotensor", &efficient_zero_tensor);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage_at);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_empty);
  library.impl("view", &at::native::view);
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("native_dropout", &native_dropout);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

// The copy itself resolves conjugate and negative views; their own kernels would call it again without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace npu

namespace at::native {
namespace {

// How scaled_dot_product_attention computes: as on the CPU, where its fused kernel takes the inputs. Only shapes, types
// and strides are looked at, so tensors of the device will do.
int64_t attention_as_on_host(const Tensor& query, const Tensor& key, const Tensor& value,
                             const std::optional<Tensor>& mask, double dropout, bool causal,
                             std::optional<double> scale, bool grouped) {
  return _fused_sdp_choice_cpp(query, key, value, mask, dropout, causal, scale, grouped);
}

}  // namespace

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_as_on_host);

}  // namespace at::native
