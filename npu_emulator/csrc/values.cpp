// Numbers in device memory that streams write and wait for (aclrtValueWrite, aclrtValueWait). torch_npu of 2026 makes its
// external events of them: a graph that holds a wait waits at each replay, until another stream writes, which may be after
// the replay has begun. Without these functions its ExternalEvent.wait does nothing before the event is first recorded.
#include "headers.h"

#if NPU_EMULATOR_CANN_9
#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>

#include "streams.h"

using namespace cann;

namespace {

std::mutex written_mutex;
std::condition_variable written;

bool is_reached(const void* address, uint64_t wanted, uint32_t mode) {
  uint64_t value = 0;
  std::memcpy(&value, address, sizeof value);
  switch (mode) {
    case ACL_STREAM_WAIT_VALUE_GEQ: return static_cast<int64_t>(value - wanted) >= 0;
    case ACL_STREAM_WAIT_VALUE_EQ: return value == wanted;
    case ACL_STREAM_WAIT_VALUE_AND: return (value & wanted) != 0;
    default: return ~(value | wanted) != 0;  // ACL_STREAM_WAIT_VALUE_NOR
  }
}

// Copies and other processes write too, and notify nobody: so the number is looked at now and then.
void wait_for_value(const void* address, uint64_t wanted, uint32_t mode) {
  constexpr std::chrono::milliseconds kLookAgain{1};
  const auto since = std::chrono::steady_clock::now();
  const std::chrono::seconds longest{seconds_of_wait()};  // 0 is for ever
  std::unique_lock<std::mutex> lock(written_mutex);
  while (!is_reached(address, wanted, mode)) {
    written.wait_for(lock, kLookAgain);
    TORCH_CHECK_WITH(DistError, !longest.count() || std::chrono::steady_clock::now() - since < longest,
                     "the value was not written within ", longest.count(), " s");
  }
}

aclError check_given(const void* address, aclrtStream stream, const char* function) {
  if (address && is_on_device(address) && stream) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_PARAM_INVALID, std::string(function) + " needs an address on a device and a stream");
}

}  // namespace

CANN_API aclError aclrtValueWrite(void* address, uint64_t value, uint32_t flag, aclrtStream stream) {
  if (const auto refused = check_given(address, stream, "aclrtValueWrite")) return refused;
  if (flag) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWrite: flag must be 0");
  submit(stream, "aclrtValueWrite", [=] {
    std::lock_guard<std::mutex> guard(written_mutex);
    std::memcpy(address, &value, sizeof value);
    written.notify_all();
  });
  return ACL_SUCCESS;
}
CANN_API aclError aclrtValueWait(void* address, uint64_t value, uint32_t mode, aclrtStream stream) {
  if (const auto refused = check_given(address, stream, "aclrtValueWait")) return refused;
  if (mode > ACL_STREAM_WAIT_VALUE_NOR) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWait: no such mode");
  will_wait(stream);
  submit(stream, "aclrtValueWait", [=] { wait_for_value(address, value, mode); });
  return ACL_SUCCESS;
}

// Which calls a capture forbids this thread: those of its mode, which is global until it is exchanged.
CANN_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  if (!mode) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRICaptureThreadExchangeMode: no mode is given");
  *mode = static_cast<aclmdlRICaptureMode>(exchange_thread_mode(*mode));
  return ACL_SUCCESS;
}
#endif
