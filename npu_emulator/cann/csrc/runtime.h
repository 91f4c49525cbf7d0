// The emulated CANN runtime as its own libraries see it: errors, streams, and graphs that are captured on them.
//
// A device is host memory, and a stream does what it is given at once, in the thread that gives it. What is given to a
// stream under capture is kept in the graph instead, and done at each replay.
#pragma once
#include <acl/acl.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define CANN_API extern "C" __attribute__((visibility("default")))

namespace cann {

// Codes of CANN that its public headers lack.
constexpr int kNullPointer = 161001;      // ACLNN_ERR_PARAM_NULLPTR
constexpr int kInvalidArgument = 161002;  // ACLNN_ERR_PARAM_INVALID
constexpr int kNoKernel = 561112;         // ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND

// Keeps `message` for aclGetRecentErrMsg and returns `code`, which is not 0.
int fail(int code, const std::string& message);

struct Task {
  const char* name;
  std::function<void()> run;
};

struct Stream;

struct Graph {
  std::vector<Task> tasks;
  std::vector<Stream*> streams;  // that take part while it is captured
};

struct Stream {
  int device;
  Graph* capturing = nullptr;
};

// Does `run` now, or keeps it if `stream` is under capture. Throws what `run` throws.
void submit(void* stream, const char* name, std::function<void()> run);
bool is_capturing(void* stream);

// Whether results of collectives appear late (NPU_EMULATOR_DEFERRED_COLLECTIVES): when something waits for the stream, and
// not when the call returns. Code that forgets to wait then reads what was there before, as it may on the device.
bool defers_collectives();
// Keeps `appear` until something waits for what `stream` has been given so far.
void defer(void* stream, std::function<void()> appear);

// The device of the calling thread, or -1 if it has chosen none.
int chosen_device() noexcept;
// The die of the machine that a device of this process is.
int die_of(int device);

}  // namespace cann
