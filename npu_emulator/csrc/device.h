// The dies of the machine, and settings that are numbers.
#pragma once
#include <cstdint>

namespace npu {

constexpr int kMaxDevices = 64;

// The whole number from 0 on that an environment variable holds, or `otherwise`.
int64_t environment_integer(const char* name, int64_t otherwise);

}  // namespace npu
