// The functions of CANN that torch_npu of 2026 needs and the pinned one does not.
#include "headers.h"

#if NPU_EMULATOR_CANN_9
#include <profiling/aprof_pub.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <ctime>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "runtime.h"

using namespace cann;

namespace {

aclError not_emulated(const std::string& function) {
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, function + " is not emulated");
}

std::mutex subscribed_mutex;
std::set<aclrtStream> subscribed;

}  // namespace

#define NOT_EMULATED(FUNCTION, ...) \
  CANN_API aclError FUNCTION(__VA_ARGS__) { return not_emulated(#FUNCTION); }

// Kernels that were compiled for the cores of a device.
NOT_EMULATED(aclrtBinaryLoadFromData, const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*)
NOT_EMULATED(aclrtBinaryGetFunction, aclrtBinHandle, const char*, aclrtFuncHandle*)
NOT_EMULATED(aclrtGetFunctionAddr, aclrtFuncHandle, void**, void**)
NOT_EMULATED(rtDevBinaryRegister, const void*, void**)
NOT_EMULATED(rtFunctionRegister, void*, const void*, const char*, const void*, uint32_t)
NOT_EMULATED(rtKernelLaunch, const void*, uint32_t, void*, uint32_t, void*, void*)
NOT_EMULATED(rtGetC2cCtrlAddr, uint64_t*, uint32_t*)

// Physical memory that processes share.
NOT_EMULATED(aclrtMemExportToShareableHandle, aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*)
NOT_EMULATED(aclrtMemImportFromShareableHandle, uint64_t, int32_t, aclrtDrvMemHandle*)
NOT_EMULATED(aclrtMemSetPidToShareableHandle, uint64_t, int32_t*, size_t)

// Dumps of what operators were given.
NOT_EMULATED(aclopStartDumpArgs, uint32_t, const char*)
NOT_EMULATED(aclopStopDumpArgs, uint32_t)

CANN_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* given) {
  submit(stream, "aclrtLaunchHostFunc", [=] { function(given); });
  return ACL_SUCCESS;
}

// The older way to call functions of the host from a stream, which a thread subscribes for. Here they are called where
// the stream's work is done, so that none waits for a thread that waits for Python, and a report never comes.
CANN_API aclError aclrtSubscribeReport(uint64_t, aclrtStream stream) {
  std::lock_guard<std::mutex> guard(subscribed_mutex);
  subscribed.insert(stream);
  return ACL_SUCCESS;
}
CANN_API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream stream) {
  std::lock_guard<std::mutex> guard(subscribed_mutex);
  if (subscribed.erase(stream)) return ACL_SUCCESS;
  return fail(ACL_ERROR_STREAM_NOT_SUBSCRIBE, "aclrtUnSubscribeReport: no thread subscribed for this stream");
}
CANN_API aclError aclrtLaunchCallback(aclrtCallback function, void* given, aclrtCallbackBlockType, aclrtStream stream) {
  {
    std::lock_guard<std::mutex> guard(subscribed_mutex);
    if (!subscribed.count(stream))
      return fail(ACL_ERROR_STREAM_NOT_SUBSCRIBE, "aclrtLaunchCallback: no thread subscribed for this stream");
  }
  submit(stream, "aclrtLaunchCallback", [=] { function(given); });
  return ACL_SUCCESS;
}
CANN_API aclError aclrtProcessReport(int32_t milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(std::max(milliseconds, 1)));
  return ACL_ERROR_WAIT_CALLBACK_TIMEOUT;
}

// The longest time of an operator: none is ended here, and what is asked for is what is set.
CANN_API aclError aclrtSetOpExecuteTimeOutV2(uint64_t microseconds, uint64_t* set) {
  *set = microseconds;
  return ACL_SUCCESS;
}

// How a stream fails, its priority and what it keeps for a profile are settings of the hardware.
CANN_API aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }

CANN_API aclError aclrtDeviceGetBareTgid(int32_t* process) {
  *process = getpid();
  return ACL_SUCCESS;
}

// Calls by which inductor's own kernels report to a profile. They are compiled for a device and do not run here.
CANN_API int32_t MsprofRegisterCallback(uint32_t, ProfCommandHandle) { return 0; }
CANN_API int32_t MsprofReportApi(uint32_t, const MsprofApi*) { return 0; }
CANN_API int32_t MsprofReportCompactInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }
CANN_API int32_t MsprofReportAdditionalInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }
CANN_API uint64_t MsprofGetHashId(const char* text, size_t length) {
  return std::hash<std::string>()(std::string(text, length));
}
CANN_API uint64_t MsprofSysCycleTime() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_RAW, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// From the library of checked C functions that comes with CANN: returns -1 if the text does not fit.
CANN_API int snprintf_s(char* to, size_t size, size_t count, const char* format, ...) {
  va_list values;
  va_start(values, format);
  const int length = std::vsnprintf(to, std::min(size, count + 1), format, values);
  va_end(values);
  return length < 0 || static_cast<size_t>(length) > std::min(size - 1, count) ? -1 : length;
}

#endif
