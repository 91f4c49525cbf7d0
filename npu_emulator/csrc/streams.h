// Code that streams and graphs share: their state, and how a piece of work is tried and counted.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime.h"
#include "stream_thread.h"

namespace cann {

// Codes that CANN's runtime gives, and its public headers at the pin lack.
constexpr int kStreamUnjoined = 107025;     // ACL_ERROR_RT_STREAM_UNJOINED
constexpr int kStreamIsCaptured = 107027;   // ACL_ERROR_RT_STREAM_CAPTURED
constexpr int kEventIsCaptured = 107028;    // ACL_ERROR_RT_EVENT_CAPTURED
constexpr int kStreamNotCaptured = 107029;  // ACL_ERROR_RT_STREAM_NOT_CAPTURED
constexpr int kNotInThisMode = 107030;      // ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT
constexpr int kTaskGroupStatus = 107033;    // ACL_ERROR_STREAM_TASK_GROUP_STATUS
constexpr int kKernelFailed = ACL_ERROR_RT_AICORE_EXCEPTION;

// The work of a graph at each replay. An update may replace a task's work while replays go on.
class Tasks {
 public:
  void add(const char* name, std::function<void()> run);
  size_t size() const { return names_.size(); }
  const char* name(size_t index) const { return names_[index]; }
  void run(size_t index);
  void replace(size_t index, std::function<void()> run);

 private:
  using Run = std::shared_ptr<const std::function<void()>>;
  std::vector<const char*> names_;
  std::vector<Run> runs_;
  std::mutex mutex_;  // of runs_, once the capture has ended
};

// Tasks of a graph from `begin` up to `end`, which may be replaced between replays.
struct TaskGroup {
  std::shared_ptr<Tasks> tasks;
  size_t begin, end;
};

// An update that is under way: what is to replace the tasks of a group, in their order, or why it cannot.
struct Update {
  std::shared_ptr<const TaskGroup> group;
  std::vector<std::function<void()>> runs;
  std::string wrong;

  void add(const char* name, std::function<void()> run);
};

struct Stream;

struct Graph {
  std::shared_ptr<Tasks> tasks = std::make_shared<Tasks>();  // a replay may outlive the graph
  std::vector<Stream*> streams;                              // that take part while it is captured; it begins on the first
  bool is_global = false;                                    // what its mode forbids is forbidden to every thread
  std::vector<const TaskGroup*> groups;
  bool waits = false;  // for events that are recorded after a replay has begun
};

struct Stream {
  static constexpr size_t kNoGroup = ~size_t{0};

  int device;
  std::shared_ptr<StreamThread> thread;  // set once, before `has_thread`
  std::atomic<bool> has_thread{false};   // where there is none work is done when it is given
  Graph* capturing = nullptr;
  size_t captured = 0;            // how much this capture has got from this stream, waits for events included
  size_t waited_for = 0;          // how much of it another stream waits for
  size_t group_begin = kNoGroup;  // of the group of tasks that is being captured
  std::unique_ptr<Update> update;

  Stream(int device, std::shared_ptr<StreamThread> thread);
};

// Guards what streams hold for captures and updates; `captures_under_way` counts both.
extern std::mutex capture_mutex;
extern std::atomic<int> captures_under_way;

// Whether a stream of the device is being captured, so that nobody may wait for the device.
bool is_device_captured(int device);
// Whether a capture forbids this thread to copy or fill memory at once, as all modes but the relaxed one do.
bool forbids_copies_at_once();
// Makes `mode` (aclmdlRICaptureMode) the one in which captures bind this thread, and returns the one before.
int exchange_thread_mode(int mode);

inline Stream* stream_of(void* stream) { return static_cast<Stream*>(stream); }
int device_of(void* stream);
const std::shared_ptr<StreamThread>& thread_of(void* stream);
// Gives a stream a thread, if it has none: it will wait for what has not been asked for yet.
void needs_thread(void* stream);
// Prepares a stream, or the graph that is captured on it, for a wait that may end long after it was asked for.
void will_wait(void* stream);

constexpr uint64_t kAll = ~uint64_t{0};
// Lets the late results of `stream`, or of all streams if it is null, up to `number` appear.
void let_appear(void* stream, uint64_t number = kAll);
// Whether they have appeared.
bool has_appeared(void* stream, uint64_t number = kAll);
// The number of the last result that is late; 0 if none is.
uint64_t late_so_far();

// Waits until a stream's thread, if it has one, has done what it was given up to `number`.
aclError finish(StreamThread* thread, uint64_t number);

// Runs `work`, called `name`, and returns its failure. Kernels notice a wrong index and a rank that does not answer,
// which a device does not survive; a device rejects everything else before the stream gets it.
Failure tried(const char* name, const std::function<void()>& work);
// Counts an operator for the meters. `name` is a constant.
void count(const char* name);

}  // namespace cann
