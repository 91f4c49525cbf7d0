// CANN's profiler: which calls the host made while it records, and what streams did for them.
#pragma once
#include <cstdint>
#include <functional>

namespace cann {

// A call of CANN by the host. Counts only while the profiler records; otherwise it costs a look at a flag.
class ProfiledCall {
 public:
  explicit ProfiledCall(const char* name);
  ~ProfiledCall();
  ProfiledCall(const ProfiledCall&) = delete;
  ProfiledCall& operator=(const ProfiledCall&) = delete;

  bool is_recorded() const { return number_ != 0; }
  // `work`, which the profiler sees as a task of this call when a stream of `device` does it. `name` is a constant.
  std::function<void()> observed(const char* name, int device, const void* stream, std::function<void()> work) const;

 private:
  const char* name_;
  uint64_t number_ = 0;  // 0 where nothing is recorded
  uint64_t begin_ = 0;
};

}  // namespace cann
