// Device memory: host memory in which every byte is charged to the die it belongs to.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <utility>

namespace npu {

class PrivatePool;

constexpr int64_t kGranule = 512;  // bytes; sizes are multiples of it

// Bytes of one die as the caching allocator of this process reports them. Sizes are rounded up to 512 bytes, as on the device.
struct MemoryStatistics {
  int64_t capacity = 0;
  int64_t limit = 0;  // what this process may take of the capacity
  int64_t allocated = 0;
  int64_t reserved = 0;
  int64_t absent = 0;  // of `allocated`: addresses of a pool without memory, which the caching allocator cannot know
  int64_t kept = 0;  // of what is reserved, by private pools: only they may use it
  int64_t peak_allocated = 0;
  int64_t peak_reserved = 0;
  int64_t watermark = 0;  // peak of what is there, allocated and not absent; reset by meters only
  int64_t allocations = 0;
  int64_t frees = 0;
  int64_t out_of_memory_errors = 0;
};

MemoryStatistics memory_statistics(c10::DeviceIndex device);
void set_capacity(c10::DeviceIndex device, int64_t bytes);
void set_limit(c10::DeviceIndex device, int64_t bytes);
// What no process of the node has reserved.
int64_t free_bytes(c10::DeviceIndex device);
void reset_peak_statistics(c10::DeviceIndex device);
// Sets the watermark to `bytes`, or to what is there now where that is more. Returns what it was.
int64_t exchange_watermark(c10::DeviceIndex device, int64_t bytes);
// Gives the reserved but unused bytes of every die back.
void empty_cache();

// Takes `bytes` from a die's capacity; throws c10::OutOfMemoryError and changes nothing when they are not there.
void charge(c10::DeviceIndex device, size_t bytes);
void uncharge(c10::DeviceIndex device, size_t bytes) noexcept;
// The same, and this process does not keep the bytes reserved.
void give_back(c10::DeviceIndex device, size_t bytes) noexcept;
// Gives the memory behind charged bytes back to the die; for this process's caching allocator they stay allocated.
void make_absent(c10::DeviceIndex device, size_t bytes) noexcept;
// Takes it again; throws c10::OutOfMemoryError and changes nothing when it is not there.
void make_present(c10::DeviceIndex device, size_t bytes);
// `give_back` for bytes that are absent.
void give_back_absent(c10::DeviceIndex device, size_t bytes) noexcept;

// Bytes that stay reserved by a private pool when their tensor is gone, and that a tensor of the pool uses again.
void put_into_reserve(c10::DeviceIndex device, int64_t bytes) noexcept;
void take_from_reserve(c10::DeviceIndex device, int64_t bytes) noexcept;

// Memory charged to a die. When its tensor is gone it goes back to `pool`, which may be null: then it is free.
void* new_block(c10::DeviceIndex device, size_t bytes, PrivatePool* pool);
void delete_block(void* data) noexcept;
std::pair<c10::DeviceIndex, int64_t> block_size(const void* data);
// The private pool that memory comes from, or null.
PrivatePool* private_pool_of(const c10::DataPtr& memory);
// The same memory without its owner; where it comes from a private pool, the pool stays.
c10::DataPtr without_owner(const c10::DataPtr& memory);

c10::Allocator* device_allocator();
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes);

// While one lives, what this thread allocates through the CPU allocator is charged to the die: operators run as CPU
// kernels, so their outputs and workspaces are refused before the kernel computes when the die is full.
class ChargeScope {
 public:
  explicit ChargeScope(c10::DeviceIndex device) noexcept;
  ~ChargeScope();
  ChargeScope(const ChargeScope&) = delete;
  ChargeScope& operator=(const ChargeScope&) = delete;

 private:
  c10::DeviceIndex outer_;
};

// Takes memory of a die while it lives, without there being any: what a real operator or collective would need.
class Workspace {
 public:
  Workspace(c10::DeviceIndex device, size_t bytes) : device_(device), bytes_(bytes) { charge(device_, bytes_); }
  ~Workspace() { uncharge(device_, bytes_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

 private:
  c10::DeviceIndex device_;
  size_t bytes_;
};

// The memory of a host storage, as device memory of `device`. What was charged already is not charged again.
c10::DataPtr adopt(const c10::intrusive_ptr<c10::StorageImpl>& host, c10::DeviceIndex device);

}  // namespace npu
