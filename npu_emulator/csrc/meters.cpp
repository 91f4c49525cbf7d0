#include "meters.h"

#include <pthread.h>

#include <mutex>

namespace npu::meters {
namespace {

struct Totals {
  std::mutex mutex;
  std::map<std::string, std::atomic<int64_t>> operators;
  std::map<std::tuple<std::string, int64_t>, CopyTotals> collectives;
  std::array<std::atomic<int64_t>, kCopyKinds> copy_counts{};
  std::array<std::atomic<int64_t>, kCopyKinds> copy_bytes{};
  std::atomic<int64_t> graphs_captured{0}, graphs_replayed{0}, graph_tasks{0};
};

Totals& totals();

// A thread that writes the meters may hold the mutex while another one forks, and would then hold it forever in the child.
Totals* make_totals() {
  pthread_atfork([] { totals().mutex.lock(); }, [] { totals().mutex.unlock(); }, [] { totals().mutex.unlock(); });
  return new Totals();
}

Totals& totals() {
  static auto* all = make_totals();
  return *all;
}

}  // namespace

std::atomic<int64_t>& operator_calls(const std::string& name) {
  std::lock_guard<std::mutex> lock(totals().mutex);
  return totals().operators[name];
}

std::map<std::string, int64_t> all_operator_calls() {
  std::lock_guard<std::mutex> lock(totals().mutex);
  std::map<std::string, int64_t> called;
  for (const auto& [name, count] : totals().operators)
    if (count) called.emplace(name, count);
  return called;
}

void count_copy(Copy direction, int64_t bytes) {
  const auto index = static_cast<size_t>(direction);
  totals().copy_counts[index].fetch_add(1, std::memory_order_relaxed);
  totals().copy_bytes[index].fetch_add(bytes, std::memory_order_relaxed);
}

std::array<CopyTotals, kCopyKinds> all_copies() {
  std::array<CopyTotals, kCopyKinds> copies;
  for (size_t index = 0; index < copies.size(); ++index)
    copies[index] = {totals().copy_counts[index], totals().copy_bytes[index]};
  return copies;
}

void count_collective(const char* kind, int64_t group_size, int64_t bytes) {
  std::lock_guard<std::mutex> lock(totals().mutex);
  auto& total = totals().collectives[{kind, group_size}];
  ++total.count;
  total.bytes += bytes;
}

std::map<std::tuple<std::string, int64_t>, CopyTotals> all_collectives() {
  std::lock_guard<std::mutex> lock(totals().mutex);
  return totals().collectives;
}

void count_graph_capture() { ++totals().graphs_captured; }

void count_graph_replay(int64_t tasks) {
  ++totals().graphs_replayed;
  totals().graph_tasks += tasks;
}

GraphTotals all_graphs() { return {totals().graphs_captured, totals().graphs_replayed, totals().graph_tasks}; }

}  // namespace npu::meters
