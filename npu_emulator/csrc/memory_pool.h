// Memory of a pool that belongs to somebody else: it can be taken away while tensors keep their addresses, and put back.
#pragma once
#include <c10/core/Allocator.h>

#include <cstdint>
#include <functional>

namespace npu::pool {

struct Region {
  int64_t bytes;  // whole pages
  c10::DeviceIndex device;
  bool present;
};

// Who is told of every region, by address, when it is made and when its tensor is gone.
struct Owner {
  std::function<void(uintptr_t, const Region&)> made;
  std::function<void(uintptr_t)> gone;
};

void set_owner(Owner owner);

// Whether what this thread allocates comes from the pool.
bool is_active() noexcept;
void set_active(bool active) noexcept;

c10::DataPtr allocate(c10::DeviceIndex owner, size_t bytes, c10::Device device);
bool owns(const c10::DataPtr& memory) noexcept;

// Gives the memory at an address back to the die; its content is lost.
void take_away(uintptr_t address);
// Puts memory there again, all zeros. Throws c10::OutOfMemoryError when the die is full.
void put_back(uintptr_t address);
// Throws if the memory at an address has been taken away.
void refuse_absent(const void* address);

}  // namespace npu::pool
