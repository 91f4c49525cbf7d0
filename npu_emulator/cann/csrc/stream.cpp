// Streams, events, and graphs captured on streams.
//
// Work is done when it is given, so an event has always happened, and waiting for one orders nothing. What events do is
// to carry a capture to further streams, as on the device: a stream that waits for an event of a captured stream takes
// part in its graph until the capture ends.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>

#include "runtime.h"

using namespace cann;

namespace {

struct Event {
  std::chrono::steady_clock::time_point recorded;
  Graph* graph = nullptr;
};

std::mutex capture_mutex;
std::atomic<int> captures_under_way{0};

constexpr int kStreamIsCaptured = ACL_ERROR_RT_FEATURE_NOT_SUPPORT;

Stream* stream_of(void* stream) { return static_cast<Stream*>(stream); }

// Whether `stream` may be waited for; a stream under capture may not.
aclError check_wait(void* stream, const char* function) {
  if (!is_capturing(stream)) return ACL_SUCCESS;
  return fail(kStreamIsCaptured, std::string(function) + " of a stream that is being captured");
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
      graph->tasks.push_back({name, std::move(run)});
      return;
    }
  }
  run();
}

}  // namespace cann

CANN_API aclError aclrtCreateStream(aclrtStream* stream) {
  *stream = new Stream{chosen_device()};
  return ACL_SUCCESS;
}
CANN_API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  return aclrtCreateStream(stream);
}
CANN_API aclError aclrtDestroyStream(aclrtStream stream) {
  delete stream_of(stream);
  return ACL_SUCCESS;
}
CANN_API aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
CANN_API aclError aclrtSynchronizeStream(aclrtStream stream) { return check_wait(stream, "aclrtSynchronizeStream"); }
CANN_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return check_wait(stream, "aclrtSynchronizeStreamWithTimeout");
}
CANN_API aclError aclrtSynchronizeDevice() { return ACL_SUCCESS; }
CANN_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return ACL_SUCCESS; }
CANN_API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
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
  recorded->recorded = std::chrono::steady_clock::now();
  std::lock_guard<std::mutex> guard(capture_mutex);
  recorded->graph = stream ? stream_of(stream)->capturing : nullptr;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  std::lock_guard<std::mutex> guard(capture_mutex);
  auto* graph = static_cast<Event*>(event)->graph;
  if (!graph || !stream || stream_of(stream)->capturing == graph) return ACL_SUCCESS;
  if (stream_of(stream)->capturing)
    return fail(kStreamIsCaptured, "a stream under capture waits for an event of another graph's capture");
  stream_of(stream)->capturing = graph;
  graph->streams.push_back(stream_of(stream));
  return ACL_SUCCESS;
}
CANN_API aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
CANN_API aclError aclrtSynchronizeEvent(aclrtEvent) { return ACL_SUCCESS; }
CANN_API aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
  const auto passed = static_cast<Event*>(to)->recorded - static_cast<Event*>(from)->recorded;
  *milliseconds = std::chrono::duration<float, std::milli>(passed).count();
  return ACL_SUCCESS;
}
CANN_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  const auto since = static_cast<Event*>(event)->recorded.time_since_epoch();
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
  *model = graph;
  return ACL_SUCCESS;
}
CANN_API aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  if (is_capturing(stream)) return fail(kStreamIsCaptured, "a graph is replayed on a stream that is being captured");
  for (const auto& task : static_cast<Graph*>(model)->tasks) {
    try {
      task.run();
    } catch (const std::exception& error) {
      return fail(kInvalidArgument, std::string(task.name) + ", replayed: " + error.what());
    }
  }
  return ACL_SUCCESS;
}
CANN_API aclError aclmdlRIDestroy(aclmdlRI model) {
  delete static_cast<Graph*>(model);
  return ACL_SUCCESS;
}
CANN_API aclError aclmdlRIDebugPrint(aclmdlRI model) {
  for (const auto& task : static_cast<Graph*>(model)->tasks) std::fprintf(stderr, "%s\n", task.name);
  return ACL_SUCCESS;
}
