// Random numbers: every die has a generator of its own, drawing what the CPU would draw from the same seed.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace npu {

const at::Generator& default_generator(c10::DeviceIndex device);
// The generator that CPU kernels draw from on behalf of an NPU generator.
const at::Generator& host_generator(const at::Generator& generator);

}  // namespace npu
