// The emulated CANN runtime as its own libraries see it: errors, streams, and graphs that are captured on them.
//
// A device is host memory, and a stream does what it is given at once, in the thread that gives it, or, with
// NPU_EMULATOR_STREAM_SEED, in a thread of its own (stream_thread.h). What is given to a stream under capture is kept in the
// graph instead, and done at each replay.
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

struct Span {
  const void* data;
  size_t bytes;
};
using Spans = std::vector<Span>;

// Does `run`: now, and throws what it throws; or in the stream's thread, and what it throws is what the next wait for the
// stream says. Keeps it if `stream` is under capture. Results that are late on the stream appear before; where `reads` says
// all that the work reads, only those that it needs.
void submit(void* stream, const char* name, std::function<void()> run, const Spans* reads = nullptr);
bool is_capturing(void* stream);

// Whether results of collectives appear late (NPU_EMULATOR_DEFERRED_COLLECTIVES): when something waits for the stream, and
// not when the call returns. Code that forgets to wait then reads what was there before, as it may on the device.
bool defers_collectives();
// Keeps what a kernel noticed that its caller does not hear of, for the next wait for a stream or the device.
void kernel_failed(const std::string& words);
// Whether any stream has a thread of its own.
bool has_stream_threads();
// Whether what an operator is given now may be used when its call has returned: by the thread of a stream, or a graph.
bool may_run_later();
// How long a stream waits for an event, in seconds; 0 is for ever (aclrtSetOpWaitTimeout).
uint32_t seconds_of_wait();
// Keeps `appear`, which writes to `written`, until something waits for what `stream` has been given so far, or reads it there.
void defer(void* stream, Spans written, std::function<void()> appear);

// Whether an address lies in memory of a device. What an operator is given from elsewhere it reads when it is called.
bool is_on_device(const void* address);

// The device of the calling thread, or -1 if it has chosen none.
int chosen_device() noexcept;
// The die of the machine that a device of this process is.
int die_of(int device);
int device_on(int die);  // the other way round

}  // namespace cann
