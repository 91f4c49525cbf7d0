// Events.
//
// If work is done as soon as it is submitted, an event has always happened, and waiting for one orders nothing, except
// that results of pending collectives appear. If streams have threads of their own, an event is the number of the last
// work that its stream was given, and waiting for it is work of the stream that waits.
//
// Events also carry a capture to further streams, as on the device: a stream that waits for an event of a captured stream
// takes part in its graph until the capture ends. External events (ACL_EVENT_EXTERNAL) stay outside: a graph that holds a
// wait for one waits at each replay, until the event is recorded, which may be after the replay has begun.
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>

#include "streams.h"

using namespace cann;

namespace {

using Clock = std::chrono::steady_clock;

// When an event happened. Work that is under way may outlive the event.
struct Moment {
  std::atomic<Clock::time_point> at{Clock::time_point{}};
};

// Whether an external event has been recorded and not been reset since.
class Flag {
 public:
  void set(bool value) {
    std::lock_guard<std::mutex> guard(mutex_);
    is_set_ = value;
    changed_.notify_all();
  }
  bool is_set() {
    std::lock_guard<std::mutex> guard(mutex_);
    return is_set_;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto reached = [this] { return is_set_; };
    const auto seconds = seconds_of_wait();
    if (!seconds) return changed_.wait(lock, reached);
    TORCH_CHECK_WITH(DistError, changed_.wait_for(lock, std::chrono::seconds(seconds), reached),
                     "the event was not recorded within ", seconds, " s");
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

struct Event {
  std::shared_ptr<Flag> flag;  // of an external event, which has nothing of what follows
  std::shared_ptr<Moment> moment = std::make_shared<Moment>();
  Graph* graph = nullptr;
  void* stream = nullptr;
  uint64_t given = 0;  // results that were late when it was recorded: those of the stream up to this number
  std::shared_ptr<StreamThread> thread;  // of the stream, and the number of the last work that the event is about
  uint64_t number = 0;
  size_t captured = 0;  // how much the capture had got from the stream
};

// Makes the results appear that were pending when the event was recorded.
void let_appear_before(const Event& event) {
  if (event.given && event.stream) let_appear(event.stream, event.given);
}

// Whether an event was recorded in a capture that goes on. Under capture_mutex.
bool is_in_capture(const Event& event) {
  return event.graph && event.stream && stream_of(event.stream)->capturing == event.graph;
}
// Such an event can be waited for by streams alone.
aclError check_asked(const Event& event, const char* function) {
  if (!captures_under_way.load(std::memory_order_acquire)) return ACL_SUCCESS;
  std::lock_guard<std::mutex> guard(capture_mutex);
  return is_in_capture(event) ? fail(kEventIsCaptured, std::string(function) + " of an event that is being captured")
                              : ACL_SUCCESS;
}

aclError create_event(aclrtEvent* event, uint32_t flags) {
  auto* made = new Event();
  if (flags & ACL_EVENT_EXTERNAL) made->flag = std::make_shared<Flag>();
  *event = made;
  return ACL_SUCCESS;
}

// Lets a stream, or the graph that is captured on it, wait for an external event.
void wait_for(const std::shared_ptr<Flag>& flag, void* stream) {
  will_wait(stream);
  submit(stream, "aclrtStreamWaitEvent", [flag] { flag->wait(); });
}

}  // namespace

CANN_API aclError aclrtCreateEvent(aclrtEvent* event) { return create_event(event, 0); }
CANN_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flags) { return create_event(event, flags); }
CANN_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) { return create_event(event, flags); }
CANN_API aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}
CANN_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  auto* recorded = static_cast<Event*>(event);
  if (recorded->flag) {
    submit(stream, "aclrtRecordEvent", [flag = recorded->flag] { flag->set(true); });
    return ACL_SUCCESS;
  }
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
  if (const auto given = late_so_far()) recorded->given = given;
  std::lock_guard<std::mutex> guard(capture_mutex);
  recorded->graph = stream ? stream_of(stream)->capturing : nullptr;
  recorded->captured = stream ? stream_of(stream)->captured : 0;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  const auto& recorded = *static_cast<Event*>(event);
  if (recorded.flag) {
    wait_for(recorded.flag, stream);
    return ACL_SUCCESS;
  }
  let_appear_before(recorded);
  if (recorded.thread && !is_capturing(stream)) needs_thread(stream);
  const auto& thread = thread_of(stream);
  if (thread && recorded.thread && thread != recorded.thread && !is_capturing(stream))
    thread->give([other = recorded.thread, number = recorded.number] { return other->wait(number); });
  std::lock_guard<std::mutex> guard(capture_mutex);
  if (!stream || stream == recorded.stream || !is_in_capture(recorded)) return ACL_SUCCESS;
  auto &waiting = *stream_of(stream), &source = *stream_of(recorded.stream);
  if (waiting.capturing && waiting.capturing != recorded.graph)
    return fail(kStreamIsCaptured, "a stream under capture waits for an event of another graph's capture");
  if (!waiting.capturing) recorded.graph->streams.push_back(&waiting);
  waiting.capturing = recorded.graph;
  ++waiting.captured;
  source.waited_for = std::max(source.waited_for, recorded.captured);
  return ACL_SUCCESS;
}
CANN_API aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
  if (const auto& flag = static_cast<Event*>(event)->flag) submit(stream, "aclrtResetEvent", [flag] { flag->set(false); });
  return ACL_SUCCESS;
}
CANN_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
  const auto& recorded = *static_cast<Event*>(event);
  if (recorded.flag) {
    const auto wrong = tried("aclrtSynchronizeEvent", [&] { recorded.flag->wait(); });
    return wrong.words.empty() ? ACL_SUCCESS : fail(kKernelFailed, wrong.words);
  }
  if (const auto refused = check_asked(recorded, "aclrtSynchronizeEvent")) return refused;
  let_appear_before(recorded);
  return finish(recorded.thread.get(), recorded.number);
}
CANN_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  const auto* recorded = static_cast<Event*>(event);
  const bool has_happened = recorded->flag ? recorded->flag->is_set()
                                           : !recorded->thread || recorded->thread->has_done(recorded->number);
  const bool is_complete =
      has_happened && (!recorded->given || !recorded->stream || has_appeared(recorded->stream, recorded->given));
  *status = is_complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return check_asked(*recorded, "aclrtQueryEventStatus");
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
