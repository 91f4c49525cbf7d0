#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>

#include <vector>

#include "device.h"

namespace npu {
namespace {

struct NpuGenerator final : c10::GeneratorImpl {
  NpuGenerator(c10::DeviceIndex device, at::Generator host_side)
      : c10::GeneratorImpl(c10::Device(kNpu, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host_side)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK_NOT_IMPLEMENTED(false, "NPU generators have no offset here"); }
  uint64_t get_offset() const override { TORCH_CHECK_NOT_IMPLEMENTED(false, "NPU generators have no offset here"); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  NpuGenerator* clone_impl() const override { return new NpuGenerator(device_.index(), host.clone()); }

  at::Generator host;
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<NpuGenerator>(device < 0 ? current_device() : device,
                                          at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val));
}
REGISTER_GENERATOR_PRIVATEUSE1(new_generator)

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (int each = 0; each < kMaxDevices; ++each) all->push_back(new_generator(each));
    return all;
  }();
  return (*generators)[resolve_device(device)];
}

const at::Generator& host_generator(const at::Generator& generator) {
  return static_cast<NpuGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

}  // namespace npu
