// Streams, events, and graphs captured on streams.
//
// Where work is done when it is given, an event has always happened, and waiting for one orders nothing, but that results of
// collectives that are late appear. Where streams have threads of their own, an event is the number of the work that its
// stream was given last, and waiting for it is work of the stream that waits.
//
// Events also carry a capture to further streams, as on the device: a stream that waits for an event of a captured stream
// takes part in its graph until the capture ends.
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

#include "device.h"
#include "meters.h"
#include "profiling.h"
#include "runtime.h"
#include "stream_thread.h"

using namespace cann;

namespace {

using Clock = std::chrono::steady_clock;

// When an event happened. Work that is under way may outlive the event.
struct Moment {
  std::atomic<Clock::time_point> at{Clock::time_point{}};
};

struct Event {
  std::shared_ptr<Moment> moment = std::make_shared<Moment>();
  Graph* graph = nullptr;
  void* stream = nullptr;
  uint64_t given = 0;  // results that were late when it was recorded: those of the stream up to this number
  std::shared_ptr<StreamThread> thread;  // of the stream, and the number of the last work that the event is about
  uint64_t number = 0;
};

// Results that have not appeared yet, in the order in which they were computed.
struct Late {
  void* stream;
  uint64_t number;
  Clock::time_point since;
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
constexpr uint64_t kAll = ~uint64_t{0};

// Lets the results of `stream`, or of all streams if it is null, up to `number` appear.
void let_appear(void* stream, uint64_t number = kAll) {
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

// Whether all of them have appeared. A network is slow and not dead: after a while they do without anyone's waiting.
bool has_appeared(void* stream, uint64_t number) {
  constexpr std::chrono::seconds kSlow{2};
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

// Counts an operator. Copies and collectives count themselves, since they are told apart by more than a name. Names are
// told by their addresses: they are constants.
void count(const char* name) {
  thread_local std::unordered_map<const char*, std::atomic<int64_t>*> counters;
  const auto [found, is_new] = counters.try_emplace(name, nullptr);
  if (is_new && std::strncmp(name, "aclrt", 5) && std::strncmp(name, "Hccl", 4))
    found->second = &npu::meters::operator_calls(name);
  if (found->second) found->second->fetch_add(1, std::memory_order_relaxed);
}

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

std::mutex capture_mutex;
std::atomic<int> captures_under_way{0};

constexpr int kStreamIsCaptured = ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
constexpr int kKernelFailed = ACL_ERROR_RT_AICORE_EXCEPTION;

Stream* stream_of(void* stream) { return static_cast<Stream*>(stream); }

const std::shared_ptr<StreamThread>& thread_of(void* stream) {
  static const std::shared_ptr<StreamThread> none;
  return stream ? stream_of(stream)->thread : none;
}

// What went wrong in `work`, called `name`. A wrong index and a rank that does not answer are noticed by kernels, which a
// device does not survive; all else a device refuses before the stream is given it.
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

int device_of(void* stream) { return stream ? stream_of(stream)->device : chosen_device(); }

// The tasks of a replay, which the profiler sees one by one if it records.
std::shared_ptr<std::vector<Task>> observed(const ProfiledCall& call, const Graph& graph, void* stream) {
  if (!call.is_recorded()) return graph.tasks;
  auto tasks = std::make_shared<std::vector<Task>>();
  for (const auto& task : *graph.tasks)
    tasks->push_back({task.name, call.observed(task.name, device_of(stream), stream, task.run)});
  return tasks;
}

// Waits until a stream's thread, if it has one, has done what it was given up to `number`.
aclError finish(StreamThread* thread, uint64_t number) {
  if (!thread) return ACL_SUCCESS;
  thread->wait(number);
  const auto wrong = thread->failure();
  return wrong.empty() ? ACL_SUCCESS : fail(kKernelFailed, wrong);
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

// What was late when the event was recorded appears.
void let_appear_before(const Event& event) {
  if (event.given && event.stream) let_appear(event.stream, event.given);
}

aclError create_event(aclrtEvent* event) {
  *event = new Event();
  return ACL_SUCCESS;
}

}  // namespace

namespace cann {

bool is_capturing(void* stream) {
  if (!captures_under_way.load(std::memory_order_acquire) || !stream) return false;
  std::lock_guard<std::mutex> guard(capture_mutex);
  return stream_of(stream)->capturing != nullptr;
}

void submit(void* stream, const char* name, std::function<void()> run) {
  if (captures_under_way.load(std::memory_order_acquire) && stream) {
    std::lock_guard<std::mutex> guard(capture_mutex);
    if (auto* graph = stream_of(stream)->capturing) {
      graph->tasks->push_back({name, std::move(run)});
      return;
    }
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
  if (stream) let_appear(stream);  // what a stream is given sees what came before on it
  count(name);
  run();
}

bool defers_collectives() { return !has_stream_threads() && is_deferring.load(std::memory_order_relaxed); }

void defer(void* stream, std::function<void()> appear) {
  std::lock_guard<std::mutex> guard(late_mutex);
  late.push_back({stream, ++last_late, Clock::now(), std::move(appear)});
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
  let_appear(nullptr);
  const auto wrong = wait_for_stream_threads();
  return wrong.empty() ? ACL_SUCCESS : fail(kKernelFailed, wrong);
}
CANN_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
CANN_API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  const auto& thread = thread_of(stream);
  const bool is_complete = has_appeared(stream, kAll) && (!thread || thread->has_done(thread->given()));
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

CANN_API aclError aclrtCreateEvent(aclrtEvent* event) { return create_event(event); }
CANN_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return create_event(event); }
CANN_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return create_event(event); }
CANN_API aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}
CANN_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  auto* recorded = static_cast<Event*>(event);
  recorded->moment = std::make_shared<Moment>();
  recorded->stream = stream;
  recorded->thread = is_capturing(stream) ? nullptr : thread_of(stream);
  if (recorded->thread)
    recorded->number = recorded->thread->give([moment = recorded->moment] {
      moment->at = Clock::now();
      return Failure();
    });
  else
    recorded->moment->at = Clock::now();
  if (any_late.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> guard(late_mutex);
    recorded->given = last_late;
  }
  std::lock_guard<std::mutex> guard(capture_mutex);
  recorded->graph = stream ? stream_of(stream)->capturing : nullptr;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  const auto& recorded = *static_cast<Event*>(event);
  let_appear_before(recorded);
  const auto& thread = thread_of(stream);
  if (thread && recorded.thread && thread != recorded.thread && !is_capturing(stream))
    thread->give([other = recorded.thread, number = recorded.number] { return other->wait(number); });
  std::lock_guard<std::mutex> guard(capture_mutex);
  auto* graph = recorded.graph;
  if (!graph || !stream || stream_of(stream)->capturing == graph) return ACL_SUCCESS;
  if (stream_of(stream)->capturing)
    return fail(kStreamIsCaptured, "a stream under capture waits for an event of another graph's capture");
  stream_of(stream)->capturing = graph;
  graph->streams.push_back(stream_of(stream));
  return ACL_SUCCESS;
}
CANN_API aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
CANN_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
  const auto& recorded = *static_cast<Event*>(event);
  let_appear_before(recorded);
  return finish(recorded.thread.get(), recorded.number);
}
CANN_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  const auto* recorded = static_cast<Event*>(event);
  const bool has_happened = !recorded->thread || recorded->thread->has_done(recorded->number);
  const bool is_complete =
      has_happened && (!recorded->given || !recorded->stream || has_appeared(recorded->stream, recorded->given));
  *status = is_complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
  const auto passed = static_cast<Event*>(to)->moment->at.load() - static_cast<Event*>(from)->moment->at.load();
  *milliseconds = std::chrono::duration<float, std::milli>(passed).count();
  return ACL_SUCCESS;
}
CANN_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  const auto since = static_cast<Event*>(event)->moment->at.load().time_since_epoch();
  *microseconds = std::chrono::duration_cast<std::chrono::microseconds>(since).count();
  return ACL_SUCCESS;
}

CANN_API aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode) {
  std::lock_guard<std::mutex> guard(capture_mutex);
  if (!stream || stream_of(stream)->capturing)
    return fail(kStreamIsCaptured, "a capture begins on a stream that is being captured, or on none");
  auto* graph = new Graph();
  graph->streams.push_back(stream_of(stream));
  stream_of(stream)->capturing = graph;
  ++captures_under_way;
  return ACL_SUCCESS;
}
CANN_API aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  std::lock_guard<std::mutex> guard(capture_mutex);
  auto* graph = stream ? stream_of(stream)->capturing : nullptr;
  *status = graph ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  *model = graph;
  return ACL_SUCCESS;
}
CANN_API aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* model) {
  std::lock_guard<std::mutex> guard(capture_mutex);
  auto* graph = stream ? stream_of(stream)->capturing : nullptr;
  if (!graph) return fail(kStreamIsCaptured, "a capture ends on a stream that is not being captured");
  for (auto* member : graph->streams) member->capturing = nullptr;
  graph->streams.clear();
  --captures_under_way;
  npu::meters::count_graph_capture();
  *model = graph;
  return ACL_SUCCESS;
}
CANN_API aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  if (is_capturing(stream)) return fail(kStreamIsCaptured, "a graph is replayed on a stream that is being captured");
  const ProfiledCall call("aclmdlRIExecuteAsync");
  const auto replay = [tasks = observed(call, *static_cast<Graph*>(model), stream)] {
    for (const auto& task : *tasks) {
      count(task.name);
      auto wrong = tried(task.name, task.run);
      if (!wrong.words.empty()) return Failure{wrong.words + " (replayed)", wrong.is_fatal};
    }
    return Failure();
  };
  npu::meters::count_graph_replay(static_cast<int64_t>(static_cast<Graph*>(model)->tasks->size()));
  if (const auto& thread = thread_of(stream)) {
    thread->give(replay);
    return ACL_SUCCESS;
  }
  if (stream) let_appear(stream);
  const auto wrong = replay();
  return wrong.words.empty() ? ACL_SUCCESS : fail(kInvalidArgument, wrong.words);
}
CANN_API aclError aclmdlRIDestroy(aclmdlRI model) {
  delete static_cast<Graph*>(model);
  return ACL_SUCCESS;
}
CANN_API aclError aclmdlRIDebugPrint(aclmdlRI model) {
  for (const auto& task : *static_cast<Graph*>(model)->tasks) std::fprintf(stderr, "%s\n", task.name);
  return ACL_SUCCESS;
}
