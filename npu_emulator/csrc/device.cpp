// Devices, contexts, versions: how many dies this process sees, which one a thread has chosen, and what they say of
// themselves.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "die_memory.h"
#include "headers.h"
#include "runtime.h"

namespace cann {
namespace {

// A thread that has chosen no device has no context: torch_npu asks for that, and restores a thread's device by it.
thread_local int chosen = -1;
std::atomic<bool> is_used{false};
std::atomic<uint32_t> wait_seconds{0};
thread_local std::string recent_error;
std::string error_of_any_thread;
std::mutex error_mutex;

// How many dies this machine has.
int dies_here() {
  return std::min(static_cast<int>(npu::environment_integer("NPU_EMULATOR_DEVICES", 8)), npu::kMaxDevices);
}

// As torch_npu's own tests say that CANN reads the list: up to what is neither a digit nor a comma, or to a die that is not
// there; none where numbers do not ascend.
std::vector<int> read_visible() {
  std::vector<int> dies;
  const char* list = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!list) {
    dies.resize(dies_here());
    std::iota(dies.begin(), dies.end(), 0);
    return dies;
  }
  const char *cursor = list, *end = list + std::strspn(list, "0123456789,");
  for (int die = 0; cursor < end; ++cursor) {
    const auto read = std::from_chars(cursor, end, die);
    if (read.ptr == cursor) break;
    const bool is_there = read.ec == std::errc() && die < dies_here();
    if (is_there && !dies.empty() && die <= dies.back()) return {};
    if (!is_there) break;
    dies.push_back(die);
    cursor = read.ptr;
  }
  return dies;
}

// The options of each device's context; device -1 stands for the process.
std::mutex options_mutex;
std::map<std::pair<int, aclSysParamOpt>, int64_t> options;

aclError keep_option(int device, aclSysParamOpt option, int64_t value) {
  std::lock_guard<std::mutex> guard(options_mutex);
  options[{device, option}] = value;
  return ACL_SUCCESS;
}
aclError kept_option(int device, aclSysParamOpt option, int64_t* value) {
  std::lock_guard<std::mutex> guard(options_mutex);
  const auto found = options.find({device, option});
  *value = found == options.end() ? 0 : found->second;
  return ACL_SUCCESS;
}

// Read once a process: a forked one may have been given dies of its own before it used any.
const std::vector<int>& visible_dies() {
  static std::mutex reading;
  static pid_t reader = 0;
  static std::vector<int> dies;
  std::lock_guard<std::mutex> guard(reading);
  if (reader != getpid()) {
    dies = read_visible();
    reader = getpid();
  }
  return dies;
}

// A context is told by its address alone.
char contexts[npu::kMaxDevices];

// The memory that a process takes of each die that it chooses, before any allocation (NPU_EMULATOR_CONTEXT_MB).
std::array<bool, npu::kMaxDevices> has_context{};
std::mutex contexts_mutex;
size_t context_bytes() {
  static const size_t bytes = static_cast<size_t>(npu::environment_integer("NPU_EMULATOR_CONTEXT_MB", 0)) << 20;
  return bytes;
}
bool take_context(int die) {
  std::lock_guard<std::mutex> guard(contexts_mutex);
  if (!context_bytes() || has_context[die]) return true;
  return has_context[die] = take_beside_programs(die, context_bytes());
}
void give_back_context(int die) {
  std::lock_guard<std::mutex> guard(contexts_mutex);
  if (!has_context[die]) return;
  has_context[die] = false;
  give_back_beside_programs(die, context_bytes());
}

}  // namespace

int fail(int code, const std::string& message) {
  std::lock_guard<std::mutex> guard(error_mutex);
  error_of_any_thread = message;
  return code;
}

int chosen_device() noexcept { return chosen; }

uint32_t seconds_of_wait() { return wait_seconds; }

int die_of(int device) { return visible_dies().at(device); }
int device_on(int die) {
  const auto& dies = visible_dies();
  return static_cast<int>(std::find(dies.begin(), dies.end(), die) - dies.begin());
}

}  // namespace cann

namespace npu {

int64_t environment_integer(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  const auto value = std::strtoll(text, &end, 10);
  return *end || value < 0 ? otherwise : value;
}

}  // namespace npu

using namespace cann;

CANN_API aclError aclInit(const char*) { return ACL_SUCCESS; }
CANN_API aclError aclFinalize() { return ACL_SUCCESS; }
CANN_API void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

// Each message once. The queue's thread runs operators, and the caller's thread reports them.
CANN_API const char* aclGetRecentErrMsg() {
  std::lock_guard<std::mutex> guard(error_mutex);
  recent_error.swap(error_of_any_thread);
  error_of_any_thread.clear();
  return recent_error.empty() ? nullptr : recent_error.c_str();
}

CANN_API aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(visible_dies().size());
  return ACL_SUCCESS;
}
// The driver's answer, which torch_npu of 2026 asks for, counts those too that this process does not see.
CANN_API int drvGetDevNum(uint32_t* count) {
  *count = static_cast<uint32_t>(dies_here());
  return 0;
}
CANN_API aclError aclrtSetDevice(int32_t device) {
  const int count = static_cast<int>(visible_dies().size());
  if (device < 0 || device >= count)
    return fail(ACL_ERROR_RT_INVALID_DEVICEID,
                "device " + std::to_string(device) + " is not one of the " + std::to_string(count) +
                    " that this process sees (ASCEND_RT_VISIBLE_DEVICES, NPU_EMULATOR_DEVICES)");
  if (!take_context(die_of(device)))
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "die " + std::to_string(die_of(device)) + " does not have the " +
                                                    std::to_string(context_bytes() >> 20) +
                                                    " MiB that a process needs (NPU_EMULATOR_CONTEXT_MB)");
  is_used = true;
  chosen = device;
  return ACL_SUCCESS;
}
// Whether this process has chosen a device.
CANN_API int npu_emulator_cann_is_used() { return is_used; }
CANN_API aclError aclrtResetDevice(int32_t device) {
  if (device >= 0 && device < static_cast<int>(visible_dies().size())) give_back_context(die_of(device));
  return ACL_SUCCESS;
}
CANN_API aclError aclrtGetDevice(int32_t* device) {
  if (chosen < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = chosen;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (chosen < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = &contexts[chosen];
  return ACL_SUCCESS;
}
// A device has one context, the one that choosing it gives.
CANN_API aclError aclrtCreateContext(aclrtContext* context, int32_t device) {
  const auto refused = aclrtSetDevice(device);
  return refused ? refused : aclrtGetCurrentContext(context);
}
CANN_API aclError aclrtSetCurrentContext(aclrtContext context) {
  if (context) chosen = static_cast<int>(static_cast<char*>(context) - contexts);
  return ACL_SUCCESS;
}
CANN_API aclError aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t device, int32_t peer) {
  *can_access = device != peer;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }

CANN_API const char* aclrtGetSocName() {
  const char* name = std::getenv("NPU_EMULATOR_CHIP");
  return name && *name ? name : DEFAULT_CHIP;
}
// The driver that goes with the release, as npu-smi says it too (npu_smi.py).
static constexpr const char* kDriver = NPU_EMULATOR_CANN_9 ? "25.5.0" : "25.2.0";
CANN_API aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof *version);
  std::strncpy(version->version, package == ACL_PKG_NAME_DRIVER ? kDriver : CANN_VERSION, sizeof version->version - 1);
  return ACL_SUCCESS;
}
CANN_API aclError aclGetCannAttribute(aclCannAttr, int32_t* value) {
  *value = 1;  // infinities and NaN are kept, as host arithmetic keeps them
  return ACL_SUCCESS;
}
CANN_API aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  constexpr int64_t kCubeCores = 24, kVectorCores = 48, kL2Bytes = int64_t{192} << 20;
  if (info == ACL_DEVICE_INFO_AI_CORE_NUM) *value = kCubeCores;
  else if (info == ACL_DEVICE_INFO_VECTOR_CORE_NUM) *value = kVectorCores;
  else *value = kL2Bytes;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo* info) {
  info->cubeUtilization = info->vectorUtilization = info->aicpuUtilization = info->memoryUtilization = 0;
  return ACL_SUCCESS;
}

CANN_API aclError aclrtSetOpWaitTimeout(uint32_t seconds) {
  wait_seconds = seconds;
  return ACL_SUCCESS;
}

// Options of a context and of the process, such as deterministic sums, which the host always has: kept to be asked for.
CANN_API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) { return keep_option(-1, option, value); }
CANN_API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) { return kept_option(-1, option, value); }
CANN_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return keep_option(chosen, option, value);
}
CANN_API aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return kept_option(chosen, option, value);
}

// Settings of the hardware that host arithmetic does not have.
CANN_API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
CANN_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
CANN_API aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
CANN_API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
CANN_API aclError aclmdlInitDump() { return ACL_SUCCESS; }
CANN_API aclError aclmdlSetDump(const char*) { return ACL_SUCCESS; }
CANN_API aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }
