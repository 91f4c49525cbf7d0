#include "memory_pool.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "memory.h"

namespace npu::pool {
namespace {

constexpr int64_t kPage = 4096;

struct Pool {
  std::mutex mutex;
  std::map<uintptr_t, Region> regions;
  Owner owner;
};

Pool& the_pool() {
  static auto* one = new Pool();
  return *one;
}

thread_local bool active = false;
std::atomic<int64_t> absent{0};

uintptr_t address_of(const void* data) { return reinterpret_cast<uintptr_t>(data); }

void release(void* data) {
  auto& pool = the_pool();
  Region region;
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    const auto found = pool.regions.find(address_of(data));
    region = found->second;
    pool.regions.erase(found);
  }
  if (pool.owner.gone) pool.owner.gone(address_of(data));
  if (region.present) {
    give_back(region.device, region.bytes);
  } else {
    give_back_absent(region.device, region.bytes);
    --absent;
  }
  munmap(data, region.bytes);
}

Region& region_at(uintptr_t address) {
  const auto found = the_pool().regions.find(address);
  TORCH_CHECK(found != the_pool().regions.end(), "no memory of the pool begins at ", address);
  return found->second;
}

}  // namespace

void set_owner(Owner owner) { the_pool().owner = std::move(owner); }

bool is_active() noexcept { return active; }
void set_active(bool value) noexcept { active = value; }

c10::DataPtr allocate(c10::DeviceIndex owner, size_t bytes, c10::Device device) {
  const Region region{(static_cast<int64_t>(bytes) + kPage - 1) / kPage * kPage, owner, true};
  charge(owner, region.bytes);
  void* data = mmap(nullptr, region.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    give_back(owner, region.bytes);
    TORCH_CHECK(false, "the host has no memory left for ", bytes, " bytes of the emulated NPU");
  }
  auto& pool = the_pool();
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    pool.regions[address_of(data)] = region;
  }
  c10::DataPtr memory(data, data, &release, device);
  if (pool.owner.made) pool.owner.made(address_of(data), region);
  return memory;
}

bool owns(const c10::DataPtr& memory) noexcept { return memory.get_deleter() == &release; }

void take_away(uintptr_t address) {
  std::lock_guard<std::mutex> lock(the_pool().mutex);
  auto& region = region_at(address);
  if (!region.present) return;
  madvise(reinterpret_cast<void*>(address), region.bytes, MADV_DONTNEED);
  region.present = false;
  ++absent;
  make_absent(region.device, region.bytes);
}

void put_back(uintptr_t address) {
  std::lock_guard<std::mutex> lock(the_pool().mutex);
  auto& region = region_at(address);
  if (region.present) return;
  make_present(region.device, region.bytes);
  region.present = true;
  --absent;
}

void refuse_absent(const void* address) {
  if (!absent.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> lock(the_pool().mutex);
  const auto found = the_pool().regions.find(address_of(address));
  TORCH_CHECK(found == the_pool().regions.end() || found->second.present,
              "this tensor's memory was taken away by the pool that it is from (sleep mode)");
}

}  // namespace npu::pool
