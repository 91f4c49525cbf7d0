// The folder PROF_... of a recording: start_info says how its clock stands to the time of day, host/data/calls.csv holds
// the calls and device_N/data/tasks.csv the tasks, in nanoseconds. msprof.py makes of it what CANN's msprof exports.
#include "profiling.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "headers.h"
#include "runtime.h"

struct aclprofConfig {
  std::vector<uint32_t> devices;
};

namespace cann {
namespace {

namespace fs = std::filesystem;

struct CallRecord {
  uint64_t number;
  const char* name;
  int64_t thread;
  uint64_t begin, end;
};
struct TaskRecord {
  uint64_t call;
  const char* name;
  int device;
  size_t stream;
  uint64_t begin, end;
};

uint64_t nanoseconds(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}
uint64_t raw_time() { return nanoseconds(CLOCK_MONOTONIC_RAW); }

std::atomic<bool> is_recording{false};
std::atomic<uint64_t> last_call{0};

struct Recording {
  std::mutex mutex;
  fs::path folder;   // for the folders PROF_..., as aclprofInit is told
  fs::path written;  // the one that is written; empty before the first start
  std::vector<CallRecord> calls;
  std::vector<TaskRecord> tasks;
  std::map<const void*, size_t> streams;  // their numbers, in the order in which they are seen
};
Recording& recording() {
  static auto* one = new Recording();
  return *one;
}

// As CANN names it: PROF, a number, the local time to the millisecond, and letters.
std::string folder_name() {
  const auto since = nanoseconds(CLOCK_REALTIME);
  const auto seconds = static_cast<time_t>(since / 1'000'000'000);
  tm local;
  localtime_r(&seconds, &local);
  char text[32];
  const auto length = std::strftime(text, sizeof text, "%Y%m%d%H%M%S", &local);
  std::snprintf(text + length, sizeof text - length, "%03d", static_cast<int>(since / 1'000'000 % 1000));
  std::string letters;
  std::random_device source;
  for (int index = 0; index < 16; ++index) letters += static_cast<char>('A' + source() % 26);
  return std::string("PROF_000001_") + text + "_" + letters;
}

void begin_folder(Recording& one, const std::vector<uint32_t>& devices) {
  one.written = one.folder / folder_name();
  fs::create_directories(one.written / "host" / "data");
  for (const auto device : devices) fs::create_directories(one.written / ("device_" + std::to_string(device)) / "data");
  const auto day = nanoseconds(CLOCK_REALTIME) / 1000, raw = raw_time();
  std::ofstream(one.written / "host" / "start_info")
      << "{\"collectionTimeBegin\": \"" << day << "\", \"clockMonotonicRaw\": \"" << raw << "\", \"pid\": \"" << getpid()
      << "\"}\n";
}

// Appends what was recorded since the last time.
void write_out(Recording& one) {
  std::ofstream calls(one.written / "host" / "data" / "calls.csv", std::ios::app);
  for (const auto& call : one.calls)
    calls << call.number << ',' << call.name << ',' << call.thread << ',' << call.begin << ',' << call.end << '\n';
  for (const auto& task : one.tasks) {
    const auto folder = one.written / ("device_" + std::to_string(task.device)) / "data";
    if (fs::is_directory(folder))
      std::ofstream(folder / "tasks.csv", std::ios::app)
          << task.call << ',' << task.name << ',' << task.stream << ',' << task.begin << ',' << task.end << '\n';
  }
  one.calls.clear();
  one.tasks.clear();
}

aclError guarded(const char* function, const std::function<void(Recording&)>& work) {
  auto& one = recording();
  std::lock_guard<std::mutex> guard(one.mutex);
  try {
    work(one);
    return ACL_SUCCESS;
  } catch (const std::exception& error) {
    return fail(ACL_ERROR_PROFILING_FAILURE, std::string(function) + ": " + error.what());
  }
}

}  // namespace

ProfiledCall::ProfiledCall(const char* name) : name_(name) {
  if (!is_recording.load(std::memory_order_relaxed)) return;
  number_ = ++last_call;
  begin_ = raw_time();
}

ProfiledCall::~ProfiledCall() {
  if (!number_) return;
  const auto end = raw_time();
  std::lock_guard<std::mutex> guard(recording().mutex);
  recording().calls.push_back({number_, name_, syscall(SYS_gettid), begin_, end});
}

std::function<void()> ProfiledCall::observed(const char* name, int device, const void* stream,
                                             std::function<void()> work) const {
  if (!number_) return work;
  return [call = number_, name, device, stream, work = std::move(work)] {
    const auto begin = raw_time();
    work();
    const auto end = raw_time();
    auto& one = recording();
    std::lock_guard<std::mutex> guard(one.mutex);
    const auto number = one.streams.emplace(stream, one.streams.size()).first->second;
    one.tasks.push_back({call, name, device, number, begin, end});
  };
}

}  // namespace cann

using namespace cann;

CANN_API aclError aclprofInit(const char* path, size_t length) {
  return guarded("aclprofInit", [&](Recording& one) { one.folder = fs::path(std::string(path, length)); });
}
CANN_API aclprofConfig* aclprofCreateConfig(uint32_t* devices, uint32_t count, aclprofAicoreMetrics, GivenEvents*,
                                            uint64_t) {
  return new aclprofConfig{{devices, devices + count}};
}
CANN_API aclError aclprofDestroyConfig(const aclprofConfig* config) {
  delete config;
  return ACL_SUCCESS;
}
// Settings concern counters of the hardware, and there are none.
CANN_API aclError aclprofSetConfig(aclprofConfigType, const char*, size_t) { return ACL_SUCCESS; }
CANN_API aclError aclprofGetSupportedFeatures(size_t* size, void** features) {
  *size = 0;
  *features = nullptr;
  return ACL_SUCCESS;
}
CANN_API aclError aclprofGetSupportedFeaturesV2(size_t* size, void** features) {
  return aclprofGetSupportedFeatures(size, features);
}
CANN_API aclError aclprofWarmup(const aclprofConfig*) { return ACL_SUCCESS; }
CANN_API aclError aclprofStart(const aclprofConfig* config) {
  return guarded("aclprofStart", [&](Recording& one) {
    if (one.written.empty()) begin_folder(one, config->devices);
    is_recording = true;
  });
}
CANN_API aclError aclprofStop(const aclprofConfig*) {
  is_recording = false;
  return guarded("aclprofStop", [](Recording& one) { write_out(one); });
}
CANN_API aclError aclprofFinalize() {
  is_recording = false;
  return guarded("aclprofFinalize", [](Recording& one) {
    if (!one.written.empty()) write_out(one);
    one.written.clear();
    one.streams.clear();
  });
}

// torch_npu asks the driver whether its calls are timed by a counter of the processor. They are not: the clock is the
// one of the recordings above.
CANN_API int halGetAPIVersion(int* version) {
  *version = 0;
  return 0;
}
CANN_API int halGetDeviceInfo(uint32_t, int32_t, int32_t, int64_t*) {
  constexpr int kNotSupported = 0xfffe;
  return kNotSupported;
}
