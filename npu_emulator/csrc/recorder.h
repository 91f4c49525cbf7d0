// Records what runs while somebody profiles: calls of operators on the host, and what the dies compute.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace npu::recorder {

enum class Kind { kOperator, kBackward, kAnnotation, kKernel, kCollective };

struct Event {
  Kind kind;
  std::string name;
  int64_t start;     // nanoseconds since the epoch
  int64_t duration;  // nanoseconds
  uint64_t thread;
  int device;  // of a kernel or collective, else -1
  std::vector<std::vector<int64_t>> shapes;
};

// Begins to record everything that all threads do. Throws if that is under way.
void start(bool with_shapes);
// Ends that, and returns what was complete by then, in the order of the ends.
std::vector<Event> stop();

extern std::atomic<bool> recording;

// While one lives, a die computes.
class Computing {
 public:
  template <typename Name>
  Computing(const Name& name, int device, Kind kind = Kind::kKernel) {
    if (recording.load(std::memory_order_relaxed)) begin(static_cast<std::string>(name), device, kind);
  }
  ~Computing() {
    if (begun_) end();
  }
  Computing(const Computing&) = delete;
  Computing& operator=(const Computing&) = delete;

 private:
  void begin(std::string name, int device, Kind kind);
  void end();

  Event event_;
  bool begun_ = false;
};

}  // namespace npu::recorder
