#include "host_alias.h"

#include <c10/core/CPUAllocator.h>

#include "device.h"
#include "memory.h"
#include "memory_pool.h"

namespace npu {
namespace {

void release_storage(void* device_storage) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(device_storage));
}

}  // namespace

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                         like.dtype());
  auto* made = tensor.unsafeGetTensorImpl();
  const auto* model = like.unsafeGetTensorImpl();
  made->set_storage_offset(model->storage_offset());
  made->set_sizes_and_strides(model->sizes(), model->strides());
  if (like.is_conj()) made->_set_conj(true);
  if (like.is_neg()) made->_set_neg(true);
  return tensor;
}

HostAliases::StoragePointer HostAliases::alias_storage(c10::StorageImpl* device_storage) {
  for (const auto& pair : storages_)
    if (pair.device.get() == device_storage) return pair.host;
  refuse_after_fork();
  pool::refuse_absent(device_storage->data());
  auto kept_alive = StoragePointer::reclaim_copy(device_storage);
  c10::raw::intrusive_ptr::incref(device_storage);  // released with the memory of the alias
  auto host = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), device_storage->nbytes(),
      c10::DataPtr(device_storage->mutable_data(), device_storage, &release_storage, c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(), /*resizable=*/true);
  storages_.push_back({std::move(kept_alive), host});
  return host;
}

at::Tensor HostAliases::alias(const at::Tensor& device_tensor) {
  for (const auto& pair : tensors_)
    if (pair.device.is_same(device_tensor)) return pair.host;
  TORCH_CHECK_NOT_IMPLEMENTED(device_tensor.has_storage(), "only dense tensors are emulated on the NPU");
  const auto* model = device_tensor.unsafeGetTensorImpl();
  auto host = tensor_over(alias_storage(model->unsafe_storage().unsafeGetStorageImpl()), c10::DispatchKey::CPU,
                          device_tensor);
  if (model->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
  tensors_.push_back({device_tensor, host});
  return host;
}

HostAliases::StoragePointer HostAliases::device_storage_of(c10::StorageImpl* host_storage, c10::DeviceIndex device) {
  for (const auto& pair : storages_)
    if (pair.host.get() == host_storage) return pair.device;
  auto host = StoragePointer::reclaim_copy(host_storage);
  const auto bytes = host->nbytes();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       adopt(host, device), device_allocator(), /*resizable=*/true);
  storages_.push_back({storage, std::move(host)});
  return storage;
}

at::Tensor HostAliases::to_device(const at::Tensor& host_tensor, c10::DeviceIndex device) {
  if (!host_tensor.defined() || !host_tensor.device().is_cpu()) return host_tensor;
  for (const auto& pair : tensors_)
    if (pair.host.is_same(host_tensor)) return pair.device;
  TORCH_CHECK_NOT_IMPLEMENTED(host_tensor.has_storage(), "only dense tensors are emulated on the NPU");
  auto* storage = host_tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return tensor_over(device_storage_of(storage, device), c10::DispatchKey::PrivateUse1, host_tensor);
}

void HostAliases::write_back() {
  for (const auto& [device, host] : storages_) {
    if (host->data() == device->data() && host->nbytes() == device->nbytes()) continue;
    const auto bytes = host->nbytes();
    device->set_data_ptr_noswap(adopt(host, device->device().index()));
    device->set_nbytes(bytes);
  }
  for (const auto& pair : tensors_) {
    auto* device = pair.device.unsafeGetTensorImpl();
    auto* host = pair.host.unsafeGetTensorImpl();
    auto* host_storage = host->unsafe_storage().unsafeGetStorageImpl();
    auto storage = device_storage_of(host_storage, pair.device.device().index());
    if (storage.get() != device->unsafe_storage().unsafeGetStorageImpl())
      device->set_storage_keep_dtype(c10::Storage(std::move(storage)));
    if (device->storage_offset() == host->storage_offset() && device->sizes() == host->sizes() &&
        device->strides() == host->strides())
      continue;
    device->set_storage_offset(host->storage_offset());
    device->set_sizes_and_strides(host->sizes(), host->strides());
  }
}

at::Tensor HostAliases::device_of(const at::Tensor& host_tensor) const {
  for (const auto& pair : tensors_)
    if (pair.host.is_same(host_tensor)) return pair.device;
  return host_tensor;
}

c10::IValue HostAliases::device_of(const c10::IValue& value) const {
  if (value.isTensor()) return device_of(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorList()) list.push_back(device_of(each));
    return list;
  }
  if (!value.isOptionalTensorList()) return value;
  c10::List<std::optional<at::Tensor>> list;
  for (const std::optional<at::Tensor> each : value.toOptionalTensorList())
    list.push_back(each ? std::optional<at::Tensor>(device_of(*each)) : std::nullopt);
  return list;
}

bool HostAliases::among_first(size_t count, const at::Tensor& device_tensor) const {
  const auto* storage = device_tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  for (size_t index = 0; index < count; ++index)
    if (storages_[index].device.get() == storage) return true;
  return false;
}

at::Tensor host_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  HostAliases aliases;
  return aliases.alias(tensor);
}

}  // namespace npu
