// Counters that tests and reports read. They only grow; whoever wants a difference takes two readings.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>

namespace npu::meters {

// Transposing copies are some of those on the device: elements that are neighbours on one side are not on the other.
enum class Copy { kHostToDevice, kDeviceToHost, kDeviceToDevice, kTransposing };
constexpr size_t kCopyKinds = 4;

struct CopyTotals {
  int64_t count = 0;
  int64_t bytes = 0;
};

// The counter of an operator, by its name ("aclnnAdd"). The reference stays valid.
std::atomic<int64_t>& operator_calls(const std::string& name);
std::map<std::string, int64_t> all_operator_calls();

void count_copy(Copy direction, int64_t bytes);
std::array<CopyTotals, kCopyKinds> all_copies();

// Bytes: what this rank hands in, or, for a receive, what it gets.
void count_collective(const char* kind, int64_t group_size, int64_t bytes);
// (kind, group size) -> totals
std::map<std::tuple<std::string, int64_t>, CopyTotals> all_collectives();

struct GraphTotals {
  int64_t captured = 0;
  int64_t replayed = 0;
  int64_t tasks = 0;  // operators, copies and collectives that replays have done
};

void count_graph_capture();
void count_graph_replay(int64_t tasks);
GraphTotals all_graphs();

}  // namespace npu::meters
