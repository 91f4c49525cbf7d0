#include "pinned_memory.h"

#include <c10/core/CPUAllocator.h>

#include <map>
#include <mutex>

namespace npu {
namespace {

struct PinnedRanges {
  std::mutex mutex;
  std::map<const char*, size_t> size_of;
};

PinnedRanges& ranges() {
  static auto* all = new PinnedRanges();
  return *all;
}

void unpin(void* context) {
  auto* host = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard<std::mutex> lock(ranges().mutex);
    ranges().size_of.erase(static_cast<const char*>(host->get()));
  }
  delete host;
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* host = new c10::DataPtr(c10::GetDefaultCPUAllocator()->allocate(bytes));
    if (host->get()) {
      std::lock_guard<std::mutex> lock(ranges().mutex);
      ranges().size_of[static_cast<const char*>(host->get())] = bytes;
    }
    return {host->get(), host, &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return allocator;
}

bool is_pinned(const void* address) {
  auto& pinned = ranges();
  std::lock_guard<std::mutex> lock(pinned.mutex);
  auto after = pinned.size_of.upper_bound(static_cast<const char*>(address));
  if (after == pinned.size_of.begin()) return false;
  const auto& [start, size] = *std::prev(after);
  return static_cast<const char*>(address) < start + size;
}

}  // namespace npu
