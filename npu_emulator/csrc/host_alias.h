// CPU tensors over the memory of NPU tensors, and the way back. This is how CPU kernels compute on device memory.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

namespace npu {

// A tensor over this memory with the type, sizes, strides, offset and lazy bits of `like`.
at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);

// The aliases of one operator call. Tensors that share storage on the device share it on the host.
class HostAliases {
 public:
  // A CPU tensor over the same memory. The same tensor gives the same alias.
  at::Tensor alias(const at::Tensor& device_tensor);
  // The NPU tensor for what a CPU kernel returned: the argument that it is an alias of, a view of an argument's
  // memory, or else a new tensor that takes the host memory over.
  at::Tensor to_device(const at::Tensor& host_tensor, c10::DeviceIndex device);
  // Carries new sizes and new memory, where a kernel gave an alias such, over to the NPU tensors.
  void write_back();
  bool empty() const { return tensors_.empty(); }
  // The NPU tensor, or a list of them, that an alias stands for; anything else comes back as it is.
  at::Tensor device_of(const at::Tensor& host_tensor) const;
  c10::IValue device_of(const c10::IValue& value) const;
  // Storages that have been seen so far, and whether an NPU tensor is over one of the first `count`.
  size_t storages() const { return storages_.size(); }
  bool among_first(size_t count, const at::Tensor& device_tensor) const;

 private:
  using StoragePointer = c10::intrusive_ptr<c10::StorageImpl>;
  struct StoragePair {
    StoragePointer device, host;
  };
  struct TensorPair {
    at::Tensor device, host;
  };

  StoragePointer alias_storage(c10::StorageImpl* device_storage);
  StoragePointer device_storage_of(c10::StorageImpl* host_storage, c10::DeviceIndex device);

  c10::SmallVector<StoragePair, 6> storages_;
  c10::SmallVector<TensorPair, 6> tensors_;
};

// A CPU tensor over the memory of one NPU tensor, which it keeps alive; other tensors come back as they are.
at::Tensor host_alias(const at::Tensor& tensor);

}  // namespace npu
