#include "device.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

namespace npu {
namespace {

thread_local c10::DeviceIndex current_index = 0;
std::atomic<bool> in_use{false};
std::atomic<bool> forked_after_use{false};
std::atomic<bool> dies_are_read{false};

void after_fork_in_child() {
  if (in_use) forked_after_use = true;
}

std::vector<int> parse_visible(const std::string& list, int64_t machine_devices) {
  std::vector<int> dies;
  const char* cursor = list.c_str();
  while (*cursor) {
    char* end = nullptr;
    const auto device = std::strtoll(cursor, &end, 10);
    if (end == cursor || device < 0 || device >= machine_devices) break;
    dies.push_back(static_cast<int>(device));
    if (*end != ',') break;
    cursor = end + 1;
  }
  return dies;
}

void forget_dies() { dies_are_read = false; }

std::vector<int> read_visible() {
  const auto machine_devices = environment_integer("NPU_EMULATOR_DEVICES", 8);
  TORCH_CHECK(machine_devices <= kMaxDevices, "NPU_EMULATOR_DEVICES must be at most ", kMaxDevices);
  if (const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES")) return parse_visible(visible, machine_devices);
  std::vector<int> all(machine_devices);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Read once a process: a process that was forked before it used a die may have been given dies of its own since.
const std::vector<int>& visible_dies() {
  static std::mutex reading;
  static std::vector<int> dies;
  if (!dies_are_read.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> guard(reading);
    if (!dies_are_read) {
      static const int registered = pthread_atfork(nullptr, nullptr, &forget_dies);
      TORCH_CHECK(registered == 0, "pthread_atfork failed");
      dies = read_visible();
      dies_are_read.store(true, std::memory_order_release);
    }
  }
  return dies;
}

}  // namespace

int64_t environment_integer(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  const auto value = std::strtoll(text, &end, 10);
  TORCH_CHECK(!*end && value >= 0, name, " must be a non-negative whole number, not '", text, "'");
  return value;
}

c10::DeviceIndex device_count() { return static_cast<c10::DeviceIndex>(visible_dies().size()); }

int die_of_machine(c10::DeviceIndex index) { return visible_dies()[index]; }

c10::DeviceIndex current_device() noexcept { return current_index; }

c10::DeviceIndex resolve_device(c10::DeviceIndex index) {
  if (index < 0) return current_index;
  TORCH_CHECK(index < device_count(), "Invalid NPU device ordinal ", static_cast<int>(index), ": ",
              static_cast<int>(device_count()), " are visible");
  return index;
}

void set_device(c10::DeviceIndex index) { current_index = resolve_device(index); }

void set_device_unchecked(c10::DeviceIndex index) noexcept {
  if (index >= 0) current_index = index;
}

void refuse_after_fork() {
  TORCH_CHECK(!forked_after_use.load(std::memory_order_relaxed),
              "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the "
              "'spawn' start method");
}

void initialize() {
  refuse_after_fork();
  if (in_use.load(std::memory_order_relaxed)) return;
  TORCH_CHECK(device_count() > 0,
              "No NPU is visible to this process (ASCEND_RT_VISIBLE_DEVICES, NPU_EMULATOR_DEVICES)");
  static const int registered = pthread_atfork(nullptr, nullptr, &after_fork_in_child);
  TORCH_CHECK(registered == 0, "pthread_atfork failed");
  in_use = true;
}

bool is_initialized() noexcept { return in_use && !forked_after_use; }
bool is_in_bad_fork() noexcept { return forked_after_use; }

}  // namespace npu
