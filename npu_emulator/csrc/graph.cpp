// Graphs captured on streams: what a stream is given under capture is kept, and done at each replay. Groups of its tasks may
// be replaced between replays by what another stream is given meanwhile, such as attention over longer sequences.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <utility>

#include "meters.h"
#include "profiling.h"
#include "streams.h"

using namespace cann;

namespace cann {

std::mutex capture_mutex;
std::atomic<int> captures_under_way{0};

namespace {

// Graphs that are being captured, guarded by capture_mutex, and those of this thread whose mode binds it alone.
std::vector<const Graph*>& under_capture() {
  static auto* all = new std::vector<const Graph*>();
  return *all;
}
thread_local bool bound_here = false;
// The mode in which captures bind this thread.
thread_local int thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

}  // namespace

bool is_device_captured(int device) {
  if (!captures_under_way.load(std::memory_order_acquire)) return false;
  std::lock_guard<std::mutex> guard(capture_mutex);
  const auto& all = under_capture();
  return std::any_of(all.begin(), all.end(), [=](const Graph* graph) { return graph->streams.front()->device == device; });
}

bool forbids_copies_at_once() {
  if (!captures_under_way.load(std::memory_order_acquire)) return false;
  if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return false;
  if (bound_here || thread_mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL) return bound_here;
  std::lock_guard<std::mutex> guard(capture_mutex);
  const auto& all = under_capture();
  return std::any_of(all.begin(), all.end(), [](const Graph* graph) { return graph->is_global; });
}

int exchange_thread_mode(int mode) { return std::exchange(thread_mode, mode); }

void Tasks::add(const char* name, std::function<void()> run) {
  names_.push_back(name);
  runs_.push_back(std::make_shared<const std::function<void()>>(std::move(run)));
}

void Tasks::run(size_t index) {
  Run run;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    run = runs_[index];
  }
  (*run)();
}

void Tasks::replace(size_t index, std::function<void()> run) {
  std::lock_guard<std::mutex> guard(mutex_);
  runs_[index] = std::make_shared<const std::function<void()>>(std::move(run));
}

void Update::add(const char* name, std::function<void()> run) {
  const auto index = group->begin + runs.size();
  runs.push_back(std::move(run));
  if (!wrong.empty() || index >= group->end) return;
  const std::string expected = group->tasks->name(index);
  if (expected != name) wrong = std::string(name) + " is to replace " + expected;
}

}  // namespace cann

namespace {

std::map<const void*, std::shared_ptr<const TaskGroup>>& groups() {
  static auto* all = new std::map<const void*, std::shared_ptr<const TaskGroup>>();
  return *all;
}

void forget(Graph* graph) {
  for (const auto* group : graph->groups) groups().erase(group);
  delete graph;
}

aclError check_captured(void* stream, const std::string& what) {
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, what + " on no stream");
  if (!stream_of(stream)->capturing) return fail(kStreamNotCaptured, what + " on a stream that is not being captured");
  return ACL_SUCCESS;
}

Failure replay(Tasks& tasks, const std::vector<std::function<void()>>& observed) {
  for (size_t index = 0; index < tasks.size(); ++index) {
    count(tasks.name(index));
    auto wrong = observed.empty() ? tried(tasks.name(index), [&] { tasks.run(index); })
                                  : tried(tasks.name(index), observed[index]);
    if (!wrong.words.empty()) return {wrong.words + " (replayed)", wrong.is_fatal};
  }
  return {};
}

// The tasks of a replay as the profiler sees them, one by one; none unless it records.
std::vector<std::function<void()>> observed_by(const ProfiledCall& call, const std::shared_ptr<Tasks>& tasks, void* stream) {
  std::vector<std::function<void()>> observed;
  for (size_t index = 0; call.is_recorded() && index < tasks->size(); ++index)
    observed.push_back(call.observed(tasks->name(index), device_of(stream), stream, [=] { tasks->run(index); }));
  return observed;
}

}  // namespace

CANN_API aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
  std::lock_guard<std::mutex> guard(capture_mutex);
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "a capture begins on no stream");
  if (stream_of(stream)->capturing) return fail(kStreamIsCaptured, "a capture begins on a stream that is being captured");
  auto* graph = new Graph();
  graph->streams.push_back(stream_of(stream));
  graph->is_global = mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  stream_of(stream)->capturing = graph;
  if (mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL) bound_here = true;
  under_capture().push_back(graph);
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
  if (!graph) return fail(kStreamNotCaptured, "a capture ends on a stream that is not being captured");
  bool in_group = false, is_joined = true;
  for (auto* member : graph->streams) {
    in_group |= std::exchange(member->group_begin, Stream::kNoGroup) != Stream::kNoGroup;
    is_joined &= member == graph->streams.front() || member->waited_for == member->captured;
    member->captured = member->waited_for = 0;
    member->capturing = nullptr;
  }
  auto& all = under_capture();
  all.erase(std::find(all.begin(), all.end(), graph));
  bound_here = false;
  graph->streams.clear();
  --captures_under_way;
  if (!is_joined) {
    forget(graph);
    return fail(kStreamUnjoined, "a capture ended before its stream waited for all streams that take part in it");
  }
  if (in_group) {
    forget(graph);
    return fail(kTaskGroupStatus, "a capture ends within a group of tasks");
  }
  npu::meters::count_graph_capture();
  *model = graph;
  return ACL_SUCCESS;
}
CANN_API aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  if (is_capturing(stream)) return fail(kStreamIsCaptured, "a graph is replayed on a stream that is being captured");
  const auto& graph = *static_cast<Graph*>(model);
  if (graph.waits) needs_thread(stream);
  const ProfiledCall call("aclmdlRIExecuteAsync");
  const auto all = [tasks = graph.tasks, observed = observed_by(call, graph.tasks, stream)] {
    return replay(*tasks, observed);
  };
  npu::meters::count_graph_replay(static_cast<int64_t>(graph.tasks->size()));
  if (const auto& thread = thread_of(stream)) {
    thread->give(all);
    return ACL_SUCCESS;
  }
  if (stream) let_appear(stream);
  const auto wrong = all();
  return wrong.words.empty() ? ACL_SUCCESS : fail(kInvalidArgument, wrong.words);
}
CANN_API aclError aclmdlRIDestroy(aclmdlRI model) {
  std::lock_guard<std::mutex> guard(capture_mutex);
  forget(static_cast<Graph*>(model));
  return ACL_SUCCESS;
}
CANN_API aclError aclmdlRIDebugPrint(aclmdlRI model) {
  const auto& tasks = *static_cast<Graph*>(model)->tasks;
  for (size_t index = 0; index < tasks.size(); ++index) std::fprintf(stderr, "%s\n", tasks.name(index));
  return ACL_SUCCESS;
}

#if NPU_EMULATOR_CANN_9
// The tasks in their order, as events that a viewer of traces reads; they have no times before they run.
CANN_API aclError aclmdlRIDebugJsonPrint(aclmdlRI model, const char* path, uint32_t) {
  const auto& tasks = *static_cast<Graph*>(model)->tasks;
  std::ofstream file(path);
  for (size_t index = 0; index < tasks.size(); ++index)
    file << (index ? ",\n" : "[\n") << R"({"name": ")" << tasks.name(index)
         << R"(", "ph": "X", "pid": 0, "tid": 0, "ts": )" << index << R"(, "dur": 1})";
  file << (tasks.size() ? "\n]\n" : "[]\n");
  file.close();
  return file ? ACL_SUCCESS : fail(ACL_ERROR_RT_PARAM_INVALID, std::string("the file ") + path + " cannot be written");
}
#endif

CANN_API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
  std::lock_guard<std::mutex> guard(capture_mutex);
  const auto refused = check_captured(stream, "a group of tasks begins");
  if (refused) return refused;
  auto& begin = stream_of(stream)->group_begin;
  if (begin != Stream::kNoGroup) return fail(kTaskGroupStatus, "a group of tasks begins within another");
  begin = stream_of(stream)->capturing->tasks->size();
  return ACL_SUCCESS;
}
CANN_API aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp* handle) {
  std::lock_guard<std::mutex> guard(capture_mutex);
  const auto refused = check_captured(stream, "a group of tasks ends");
  if (refused) return refused;
  auto& begin = stream_of(stream)->group_begin;
  if (begin == Stream::kNoGroup) return fail(kTaskGroupStatus, "a group of tasks ends that has not begun");
  auto& graph = *stream_of(stream)->capturing;
  const auto group = std::make_shared<TaskGroup>(TaskGroup{graph.tasks, begin, graph.tasks->size()});
  begin = Stream::kNoGroup;
  graph.groups.push_back(group.get());
  groups()[group.get()] = group;
  *handle = group.get();
  return ACL_SUCCESS;
}
// From here to its end, what the stream is given replaces the tasks of the group, in their order.
CANN_API aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle) {
  std::lock_guard<std::mutex> guard(capture_mutex);
  const auto found = groups().find(handle);
  if (!stream || found == groups().end())
    return fail(ACL_ERROR_RT_PARAM_INVALID, "an update needs a stream and a group of tasks of a graph");
  if (stream_of(stream)->capturing) return fail(kStreamIsCaptured, "an update begins on a stream that is being captured");
  if (stream_of(stream)->update) return fail(kTaskGroupStatus, "an update begins within another");
  stream_of(stream)->update = std::make_unique<Update>(Update{found->second, {}, {}});
  ++captures_under_way;
  return ACL_SUCCESS;
}
CANN_API aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "an update ends on no stream");
  std::shared_ptr<Update> update;
  {
    std::lock_guard<std::mutex> guard(capture_mutex);
    if (!stream_of(stream)->update) return fail(kTaskGroupStatus, "an update ends that has not begun");
    update = std::move(stream_of(stream)->update);
    --captures_under_way;
  }
  const auto& group = *update->group;
  const auto given = update->runs.size(), expected = group.end - group.begin;
  if (update->wrong.empty() && given != expected)
    update->wrong = std::to_string(given) + " tasks are to replace " + std::to_string(expected);
  if (!update->wrong.empty()) return fail(ACL_ERROR_RT_PARAM_INVALID, "update of a group of tasks: " + update->wrong);
  submit(stream, "aclmdlRICaptureTaskUpdate", [update] {
    for (size_t index = 0; index < update->runs.size(); ++index)
      update->group->tasks->replace(update->group->begin + index, update->runs[index]);
  });
  return ACL_SUCCESS;
}
