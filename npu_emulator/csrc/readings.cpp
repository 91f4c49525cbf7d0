// Counters of the emulated device's work in this process, for Python to read (npu_emulator/counters.py).
#include <string>

#include "meters.h"
#include "runtime.h"

namespace {

// Text that lives until the same thread asks for the next one.
const char* kept(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

}  // namespace

// A line "calls name" for each operator that a stream has done; those of a graph count when it is replayed.
CANN_API const char* npu_emulator_cann_operator_calls() {
  std::string text;
  for (const auto& [name, calls] : npu::meters::all_operator_calls()) text += std::to_string(calls) + " " + name + "\n";
  return kept(std::move(text));
}
// A line "kind ranks count bytes" for each kind of collective in groups of each size.
CANN_API const char* npu_emulator_cann_collectives() {
  std::string text;
  for (const auto& [key, totals] : npu::meters::all_collectives())
    text += std::get<0>(key) + " " + std::to_string(std::get<1>(key)) + " " + std::to_string(totals.count) + " " +
            std::to_string(totals.bytes) + "\n";
  return kept(std::move(text));
}
// Count and bytes of the copies of each kind of npu::meters::Copy.
CANN_API void npu_emulator_cann_copies(int64_t numbers[2 * npu::meters::kCopyKinds]) {
  for (const auto& totals : npu::meters::all_copies()) {
    *numbers++ = totals.count;
    *numbers++ = totals.bytes;
  }
}
// Graphs captured and replayed, and what replays have done.
CANN_API void npu_emulator_cann_graphs(int64_t numbers[3]) {
  const auto totals = npu::meters::all_graphs();
  numbers[0] = totals.captured;
  numbers[1] = totals.replayed;
  numbers[2] = totals.tasks;
}
