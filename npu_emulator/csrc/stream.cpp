// Streams: work is done when it is given, or by the stream's thread; results of collectives may appear late.
#include <c10/util/Exception.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "device.h"
#include "meters.h"
#include "profiling.h"
#include "streams.h"

using namespace cann;

namespace {

using Clock = std::chrono::steady_clock;

// Results that have not appeared yet, in the order in which they were computed.
struct Late {
  void* stream;
  uint64_t number;
  Clock::time_point since;
  Spans written;
  std::function<void()> appear;
};
std::mutex late_mutex;
std::list<Late> late;
uint64_t last_late = 0;
std::atomic<bool> any_late{false};
std::atomic<bool> is_deferring{[] {
  const char* text = std::getenv("NPU_EMULATOR_DEFERRED_COLLECTIVES");
  return text && !std::strcmp(text, "1");
}()};

// torch_npu's queue has a thread that frees what operators have used, and asks each microsecond whether there is
// something, for as long as the process lives. How late the kernel may wake a thread is 50 microseconds by default, which
// costs a tenth to a quarter of a processor. The thread is started between the first two streams of a device, and inherits
// that time from the one that starts it.
constexpr unsigned long kPollsAfterNanoseconds = 5'000'000;

thread_local unsigned long own_slack = 0;  // of a thread that has another one for a while

void let_threads_of_the_queue_poll_less(int device) {
  static std::atomic<bool> has_streams[npu::kMaxDevices];
  if (device < 0 || has_streams[device].exchange(true)) return;
  own_slack = static_cast<unsigned long>(prctl(PR_GET_TIMERSLACK));
  prctl(PR_SET_TIMERSLACK, kPollsAfterNanoseconds);
}
void restore_timers() {
  if (own_slack) prctl(PR_SET_TIMERSLACK, own_slack);
  own_slack = 0;
}

std::mutex unheard_mutex;
std::string unheard;

// Takes the pending kernel error, so that it is reported once.
aclError unheard_failure() {
  std::lock_guard<std::mutex> guard(unheard_mutex);
  const auto words = std::exchange(unheard, {});
  return words.empty() ? ACL_SUCCESS : fail(kKernelFailed, words);
}

// Waits until a stream has done what it was given.
aclError finish(void* stream) {
  let_appear(stream);
  const auto& thread = thread_of(stream);
  return finish(thread.get(), thread ? thread->given() : 0);
}

// Whether `stream` may be waited for; a stream under capture may not.
aclError check_wait(void* stream, const char* function) {
  if (!is_capturing(stream)) return ACL_SUCCESS;
  return fail(kStreamIsCaptured, std::string(function) + " of a stream that is being captured");
}

}  // namespace

namespace cann {
namespace {

bool overlap(const Span& one, const Span& other) {
  const auto* first = static_cast<const char*>(one.data);
  const auto* second = static_cast<const char*>(other.data);
  return first < second + other.bytes && second < first + one.bytes;
}

// The last result that is late on a stream and that work which reads `reads` needs; 0 if it needs none.
uint64_t needed_of_late(void* stream, const Spans& reads) {
  std::lock_guard<std::mutex> guard(late_mutex);
  uint64_t last = 0;
  for (const auto& one : late)
    for (const auto& written : one.written)
      for (const auto& read : reads)
        if (one.stream == stream && overlap(written, read)) last = one.number;
  return last;
}

}  // namespace

Stream::Stream(int device, std::shared_ptr<StreamThread> given)
    : device(device), thread(std::move(given)), has_thread(thread != nullptr) {}

int device_of(void* stream) { return stream ? stream_of(stream)->device : chosen_device(); }

const std::shared_ptr<StreamThread>& thread_of(void* stream) {
  static const std::shared_ptr<StreamThread> none;
  return stream && stream_of(stream)->has_thread.load(std::memory_order_acquire) ? stream_of(stream)->thread : none;
}

void needs_thread(void* stream) {
  if (!stream || thread_of(stream)) return;
  let_appear(stream);
  std::lock_guard<std::mutex> guard(capture_mutex);
  if (stream_of(stream)->thread) return;
  stream_of(stream)->thread = needed_stream_thread();
  stream_of(stream)->has_thread.store(true, std::memory_order_release);
}

void will_wait(void* stream) {
  if (!is_capturing(stream)) return needs_thread(stream);
  std::lock_guard<std::mutex> guard(capture_mutex);
  stream_of(stream)->capturing->waits = true;
}

void let_appear(void* stream, uint64_t number) {
  if (!any_late.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> guard(late_mutex);
  for (auto one = late.begin(); one != late.end();) {
    if ((stream && one->stream != stream) || one->number > number) {
      ++one;
      continue;
    }
    one->appear();
    one = late.erase(one);
  }
  any_late = !late.empty();
}

bool has_appeared(void* stream, uint64_t number) {
  constexpr std::chrono::seconds kSlow{2};  // a network is slow and not dead: then they appear without anyone's waiting
  if (!any_late.load(std::memory_order_acquire)) return true;
  Clock::time_point youngest{};
  {
    std::lock_guard<std::mutex> guard(late_mutex);
    for (const auto& one : late)
      if (one.stream == stream && one.number <= number) youngest = one.since;
  }
  if (youngest != Clock::time_point{} && Clock::now() - youngest < kSlow) return false;
  let_appear(stream, number);
  return true;
}

uint64_t late_so_far() {
  if (!any_late.load(std::memory_order_acquire)) return 0;
  std::lock_guard<std::mutex> guard(late_mutex);
  return last_late;
}

aclError finish(StreamThread* thread, uint64_t number) {
  if (thread) thread->wait(number);
  const auto wrong = thread ? thread->failure() : std::string();
  return wrong.empty() ? unheard_failure() : fail(kKernelFailed, wrong);
}

void kernel_failed(const std::string& words) {
  std::lock_guard<std::mutex> guard(unheard_mutex);
  if (unheard.empty()) unheard = words;
}

Failure tried(const char* name, const std::function<void()>& work) {
  try {
    work();
    return {};
  } catch (const c10::Error& error) {
    const bool is_fatal = dynamic_cast<const c10::IndexError*>(&error) || dynamic_cast<const c10::DistError*>(&error);
    return {std::string(name) + ": " + error.what_without_backtrace(), is_fatal};
  } catch (const std::exception& error) {
    return {std::string(name) + ": " + error.what()};
  }
}

// Names are told by their addresses: they are constants.
void count(const char* name) {
  thread_local std::unordered_map<const char*, std::atomic<int64_t>*> counters;
  const auto [found, is_new] = counters.try_emplace(name, nullptr);
  // Copies, collectives and graphs count themselves.
  const bool is_operator = std::strncmp(name, "aclrt", 5) && std::strncmp(name, "aclmdl", 6) && std::strncmp(name, "Hccl", 4);
  if (is_new && is_operator) found->second = &npu::meters::operator_calls(name);
  if (found->second) found->second->fetch_add(1, std::memory_order_relaxed);
}

bool is_capturing(void* stream) {
  if (!captures_under_way.load(std::memory_order_acquire) || !stream) return false;
  std::lock_guard<std::mutex> guard(capture_mutex);
  return stream_of(stream)->capturing != nullptr;
}

void submit(void* stream, const char* name, std::function<void()> run, const Spans* reads) {
  if (captures_under_way.load(std::memory_order_acquire) && stream) {
    std::lock_guard<std::mutex> guard(capture_mutex);
    auto& one = *stream_of(stream);
    if (one.capturing) {
      ++one.captured;
      return one.capturing->tasks->add(name, std::move(run));
    }
    if (one.update) return one.update->add(name, std::move(run));
  }
  const ProfiledCall call(name);
  run = call.observed(name, device_of(stream), stream, std::move(run));
  if (const auto& thread = thread_of(stream)) {
    thread->give([name, run = std::move(run)] {
      count(name);
      return tried(name, run);
    });
    return;
  }
  // Work on a stream sees the results of earlier work on it.
  if (stream && any_late.load(std::memory_order_acquire)) {
    if (!reads) let_appear(stream);
    else if (const auto last = needed_of_late(stream, *reads)) let_appear(stream, last);
  }
  count(name);
  run();
}

bool may_run_later() { return has_stream_threads() || captures_under_way.load(std::memory_order_acquire); }

bool defers_collectives() { return !has_stream_threads() && is_deferring.load(std::memory_order_relaxed); }

void defer(void* stream, Spans written, std::function<void()> appear) {
  std::lock_guard<std::mutex> guard(late_mutex);
  late.push_back({stream, ++last_late, Clock::now(), std::move(written), std::move(appear)});
  any_late = true;
}

}  // namespace cann

// Says whether results of collectives appear late from now on, and returns whether they did; all that are late appear.
CANN_API int npu_emulator_defer_collectives(int on) {
  let_appear(nullptr);
  return is_deferring.exchange(on != 0);
}

CANN_API aclError aclrtCreateStream(aclrtStream* stream) {
  restore_timers();
  *stream = new Stream{chosen_device(), new_stream_thread()};
  let_threads_of_the_queue_poll_less(chosen_device());
  return ACL_SUCCESS;
}
CANN_API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  return aclrtCreateStream(stream);
}
CANN_API aclError aclrtDestroyStream(aclrtStream stream) {
  finish(stream);
  delete stream_of(stream);
  return ACL_SUCCESS;
}
CANN_API aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
CANN_API aclError aclrtSynchronizeStream(aclrtStream stream) {
  const auto refused = check_wait(stream, "aclrtSynchronizeStream");
  return refused ? refused : finish(stream);
}
CANN_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  const auto refused = check_wait(stream, "aclrtSynchronizeStreamWithTimeout");
  return refused ? refused : finish(stream);
}
CANN_API aclError aclrtSynchronizeDevice() {
  if (is_device_captured(chosen_device()))
    return fail(kStreamIsCaptured, "aclrtSynchronizeDevice of a device with a stream that is being captured");
  let_appear(nullptr);
  const auto wrong = wait_for_stream_threads();
  return wrong.empty() ? unheard_failure() : fail(kKernelFailed, wrong);
}
CANN_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
CANN_API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  const auto& thread = thread_of(stream);
  const bool is_complete = has_appeared(stream) && (!thread || thread->has_done(thread->given()));
  *status = is_complete ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return check_wait(stream, "aclrtStreamQuery");
}
CANN_API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
CANN_API aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
CANN_API aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  *flag = 0;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtDeviceTaskAbort(int32_t, uint32_t) { return ACL_SUCCESS; }
