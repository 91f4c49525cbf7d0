#include "recorder.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

namespace npu::recorder {

std::atomic<bool> recording{false};

namespace {

struct Recording {
  std::mutex mutex;
  std::vector<Event> events;
  at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
};

Recording& current_recording() {
  static auto* one = new Recording();
  return *one;
}

int64_t now() {
  const auto time = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

void keep(Event event) {
  event.duration = now() - event.start;
  std::lock_guard<std::mutex> lock(current_recording().mutex);
  if (recording) current_recording().events.push_back(std::move(event));
}

struct Call final : at::ObserverContext {
  Event event;
};

Kind kind_of(at::RecordScope scope) {
  if (scope == at::RecordScope::BACKWARD_FUNCTION) return Kind::kBackward;
  return scope == at::RecordScope::USER_SCOPE ? Kind::kAnnotation : Kind::kOperator;
}

std::unique_ptr<at::ObserverContext> begin_call(const at::RecordFunction& function) {
  auto call = std::make_unique<Call>();
  auto& event = call->event;
  event = {kind_of(function.scope()), function.name(), now(), 0, function.threadId(), -1, {}};
  if (!function.needsInputs()) return call;
  for (const auto& input : function.inputs()) {
    const bool dense = input.isTensor() && input.toTensor().defined() && !input.toTensor().is_nested();
    event.shapes.push_back(dense ? input.toTensor().sizes().vec() : std::vector<int64_t>());
  }
  return call;
}

void end_call(const at::RecordFunction&, at::ObserverContext* context) {
  if (context) keep(std::move(static_cast<Call*>(context)->event));
}

}  // namespace

void start(bool with_shapes) {
  std::lock_guard<std::mutex> lock(current_recording().mutex);
  TORCH_CHECK(!recording, "a profiler is recording already");
  current_recording().events.clear();
  current_recording().callback = at::addGlobalCallback(
      at::RecordFunctionCallback(&begin_call, &end_call)
          .needsInputs(with_shapes)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
  recording = true;
}

std::vector<Event> stop() {
  std::lock_guard<std::mutex> lock(current_recording().mutex);
  if (!recording) return {};
  recording = false;
  at::removeCallback(current_recording().callback);
  return std::exchange(current_recording().events, {});
}

void Computing::begin(std::string name, int device, Kind kind) {
  event_ = {kind, std::move(name), now(), 0, at::RecordFunction::currentThreadId(), device, {}};
  begun_ = true;
}

void Computing::end() { keep(std::move(event_)); }

}  // namespace npu::recorder
