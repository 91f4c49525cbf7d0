#include "hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <algorithm>
#include <cstring>

#include "device.h"
#include "generator.h"
#include "graph.h"
#include "memory.h"
#include "pinned_memory.h"

namespace npu {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kNpu, current_device()}; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialized(); }
  void initPrivateUse1() const override { initialize(); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* resized = storage.unsafeGetStorageImpl();
    if (resized->nbytes()) graph::refuse("resize_ of a tensor that has content, which moves it");
    auto memory = allocate_on(resized->device().index(), bytes);
    const auto kept = std::min(bytes, resized->nbytes());
    if (kept) std::memcpy(memory.get(), resized->data(), kept);
    resized->set_data_ptr_noswap(std::move(memory));
    resized->set_nbytes(bytes);
  }
};

}  // namespace

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }

}  // namespace npu
