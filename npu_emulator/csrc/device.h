// The emulated dies of this process: how many there are, which one is current, and whether they may be used.
#pragma once
#include <c10/core/Device.h>
#include <cstdint>

namespace npu {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;

// Dies visible to this process: entries of ASCEND_RT_VISIBLE_DEVICES up to the first that is not a die of this
// machine, or else NPU_EMULATOR_DEVICES (8 unless set). Read once.
c10::DeviceIndex device_count();
// The die of the machine that one of this process is.
int die_of_machine(c10::DeviceIndex index);
c10::DeviceIndex current_device() noexcept;
// Throws for a die that is not visible.
void set_device(c10::DeviceIndex index);
void set_device_unchecked(c10::DeviceIndex index) noexcept;
// The die meant by an index that may be -1 (the current one). Throws for a die that is not visible.
c10::DeviceIndex resolve_device(c10::DeviceIndex index);

// Marks the dies as in use. Throws in a process that was forked after its parent did so.
void initialize();
bool is_initialized() noexcept;
bool is_in_bad_fork() noexcept;
void refuse_after_fork();

int64_t environment_integer(const char* name, int64_t otherwise);

}  // namespace npu
