#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "allocator_options.h"
#include "device.h"
#include "graph.h"
#include "memory_pool.h"
#include "node.h"
#include "private_pool.h"

namespace npu {
namespace {

constexpr size_t kHeader = 64;  // keeps the alignment of the CPU allocator

struct Ledger {
  std::mutex mutex;
  MemoryStatistics statistics;
};

Ledger& ledger(c10::DeviceIndex device) {
  static auto* ledgers = [] {
    if (const char* options = std::getenv("PYTORCH_NPU_ALLOC_CONF")) check_allocator_options(options);
    auto* all = new std::array<Ledger, kMaxDevices>();
    for (auto& one : *all) {
      one.statistics.capacity = environment_integer("NPU_EMULATOR_CAPACITY_MB", 4096) << 20;
      one.statistics.limit = one.statistics.capacity;
    }
    return all;
  }();
  return (*ledgers)[device];
}

int64_t rounded(size_t bytes) { return (static_cast<int64_t>(bytes) + kGranule - 1) / kGranule * kGranule; }

int64_t present(const MemoryStatistics& now) { return now.allocated - now.absent; }

std::string readable(int64_t bytes) {
  char text[32];
  if (bytes > (int64_t{1} << 30)) {
    std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1 << 30));
  } else if (bytes > (1 << 20)) {
    std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  } else if (bytes > (1 << 10)) {
    std::snprintf(text, sizeof text, "%.2f KiB", static_cast<double>(bytes) / (1 << 10));
  } else {
    std::snprintf(text, sizeof text, "%lld bytes", static_cast<long long>(bytes));
  }
  return text;
}

std::string program_of(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/comm");
  std::string name;
  std::getline(file, name);
  return name;
}

std::string shares_of(const std::vector<node::Holder>& holders) {
  std::string text;
  for (const auto& [process, bytes] : holders)
    text += c10::str(text.empty() ? " Held on this die: " : ", ", readable(bytes), " by process ", process, " (",
                     program_of(process), process == getpid() ? ", this one)" : ")");
  return text.empty() ? text : text + ".";
}

int64_t sum(const std::vector<node::Holder>& holders) {
  return std::accumulate(holders.begin(), holders.end(), int64_t{0},
                         [](int64_t total, const node::Holder& holder) { return total + holder.bytes; });
}

[[noreturn]] void throw_out_of_memory(c10::DeviceIndex device, size_t bytes, const MemoryStatistics& now) {
  const auto holders = node::holders(die_of_machine(device));
  const auto unused = std::max<int64_t>(0, now.capacity - sum(holders));
  TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", readable(bytes), " (NPU ",
                   static_cast<int>(device), "; ", readable(now.capacity), " total capacity; ", readable(now.allocated),
                   " already allocated; ", readable(now.allocated), " current active; ", readable(unused), " free; ",
                   readable(now.reserved),
                   " reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
                   "max_split_size_mb to avoid fragmentation.",
                   shares_of(holders),
                   now.limit < now.capacity ? c10::str(" This process is limited to ", readable(now.limit), ".") : "");
}

struct BlockHeader {
  int64_t bytes;
  PrivatePool* pool;
  c10::DeviceIndex device;
};
static_assert(sizeof(BlockHeader) <= kHeader);

// The allocator that torch had before the charging one below took its place.
c10::Allocator& host_memory() {
  static auto* allocator = c10::GetDefaultCPUAllocator();
  return *allocator;
}

char* base_of(const void* data) { return static_cast<char*>(const_cast<void*>(data)) - kHeader; }
BlockHeader& header_of(const void* data) { return *reinterpret_cast<BlockHeader*>(base_of(data)); }

void release_block(void* data) {
  if (!data) return;
  if (auto* pool = header_of(data).pool) {
    pool->release(data);
  } else {
    delete_block(data);
  }
}

c10::DataPtr charged_block(c10::DeviceIndex owner, size_t bytes, c10::Device device) {
  if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
  if (auto* captured = graph::pool()) {
    auto* data = captured->allocate(owner, bytes);
    graph::note_allocation(data);
    return {data, data, &release_block, device};
  }
  if (pool::is_active()) return pool::allocate(owner, bytes, device);
  auto* data = new_block(owner, bytes, nullptr);
  return {data, data, &release_block, device};
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device(), bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

thread_local c10::DeviceIndex charged_device = -1;

class ChargingHostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (charged_device < 0) return host_memory().allocate(bytes);
    return charged_block(charged_device, bytes, c10::Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return charged_device < 0 ? host_memory().raw_deleter() : &release_block;
  }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

DeviceAllocator the_device_allocator;
REGISTER_ALLOCATOR(kNpu, &the_device_allocator);

ChargingHostAllocator the_charging_allocator;
const bool charging_installed = [] {
  c10::SetCPUAllocator(&the_charging_allocator, /*priority=*/1);
  return true;
}();

struct Adopted {
  c10::intrusive_ptr<c10::StorageImpl> host;
  c10::DeviceIndex device;
  size_t bytes;
};

void release_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  if (adopted->bytes) uncharge(adopted->device, adopted->bytes);
  delete adopted;
}

void release_pool_use(void* context) { delete static_cast<PoolUse*>(context); }

}  // namespace

MemoryStatistics memory_statistics(c10::DeviceIndex device) {
  auto& of = ledger(resolve_device(device));
  std::lock_guard<std::mutex> lock(of.mutex);
  return of.statistics;
}

void set_capacity(c10::DeviceIndex device, int64_t bytes) {
  auto& of = ledger(resolve_device(device));
  std::lock_guard<std::mutex> lock(of.mutex);
  of.statistics.capacity = of.statistics.limit = bytes;
}

void set_limit(c10::DeviceIndex device, int64_t bytes) {
  auto& of = ledger(resolve_device(device));
  std::lock_guard<std::mutex> lock(of.mutex);
  of.statistics.limit = bytes;
}

int64_t free_bytes(c10::DeviceIndex device) {
  const auto held = sum(node::holders(die_of_machine(resolve_device(device))));
  return std::max<int64_t>(0, memory_statistics(device).capacity - held);
}

void reset_peak_statistics(c10::DeviceIndex device) {
  auto& of = ledger(resolve_device(device));
  std::lock_guard<std::mutex> lock(of.mutex);
  of.statistics.peak_allocated = of.statistics.allocated;
  of.statistics.peak_reserved = of.statistics.reserved;
}

int64_t exchange_watermark(c10::DeviceIndex device, int64_t bytes) {
  auto& of = ledger(resolve_device(device));
  std::lock_guard<std::mutex> lock(of.mutex);
  const auto before = of.statistics.watermark;
  of.statistics.watermark = std::max(bytes, present(of.statistics));
  return before;
}

void empty_cache() {
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    auto& of = ledger(device);
    std::lock_guard<std::mutex> lock(of.mutex);
    auto& now = of.statistics;
    const auto used = now.allocated + now.kept;
    if (now.reserved > used) node::release(die_of_machine(device), now.reserved - used);
    now.reserved = used;
  }
}

void charge(c10::DeviceIndex device, size_t bytes) {
  refuse_after_fork();
  auto& of = ledger(device);
  const auto wanted = rounded(bytes);
  std::lock_guard<std::mutex> lock(of.mutex);
  auto& now = of.statistics;
  // What this process has reserved already is its own; only more than that is asked of the die.
  const auto used = now.allocated + now.kept + wanted;
  const auto growth = used - now.reserved;
  if (present(now) + now.kept + wanted > std::min(now.limit, now.capacity) ||
      (growth > 0 && !node::reserve(die_of_machine(device), growth, now.capacity))) {
    ++now.out_of_memory_errors;
    throw_out_of_memory(device, bytes, now);
  }
  now.allocated += wanted;
  ++now.allocations;
  now.reserved = std::max(now.reserved, used);
  now.peak_allocated = std::max(now.peak_allocated, now.allocated);
  now.peak_reserved = std::max(now.peak_reserved, now.reserved);
  now.watermark = std::max(now.watermark, present(now));
}

void uncharge(c10::DeviceIndex device, size_t bytes) noexcept {
  auto& of = ledger(device);
  std::lock_guard<std::mutex> lock(of.mutex);
  of.statistics.allocated -= rounded(bytes);
  ++of.statistics.frees;
}

void give_back(c10::DeviceIndex device, size_t bytes) noexcept {
  uncharge(device, bytes);
  auto& of = ledger(device);
  std::lock_guard<std::mutex> lock(of.mutex);
  of.statistics.reserved -= rounded(bytes);
  node::release(die_of_machine(device), rounded(bytes));
}

void make_absent(c10::DeviceIndex device, size_t bytes) noexcept {
  auto& of = ledger(device);
  std::lock_guard<std::mutex> lock(of.mutex);
  of.statistics.absent += rounded(bytes);
  node::release(die_of_machine(device), rounded(bytes));
}

void make_present(c10::DeviceIndex device, size_t bytes) {
  auto& of = ledger(device);
  const auto wanted = rounded(bytes);
  std::lock_guard<std::mutex> lock(of.mutex);
  auto& now = of.statistics;
  if (present(now) + now.kept + wanted > std::min(now.limit, now.capacity) ||
      !node::reserve(die_of_machine(device), wanted, now.capacity)) {
    ++now.out_of_memory_errors;
    throw_out_of_memory(device, bytes, now);
  }
  now.absent -= wanted;
  now.watermark = std::max(now.watermark, present(now));
}

void give_back_absent(c10::DeviceIndex device, size_t bytes) noexcept {
  uncharge(device, bytes);
  auto& of = ledger(device);
  std::lock_guard<std::mutex> lock(of.mutex);
  of.statistics.reserved -= rounded(bytes);
  of.statistics.absent -= rounded(bytes);
}

void put_into_reserve(c10::DeviceIndex device, int64_t bytes) noexcept {
  auto& of = ledger(device);
  std::lock_guard<std::mutex> lock(of.mutex);
  of.statistics.allocated -= rounded(bytes);
  of.statistics.kept += rounded(bytes);
  ++of.statistics.frees;
}

void take_from_reserve(c10::DeviceIndex device, int64_t bytes) noexcept {
  auto& of = ledger(device);
  std::lock_guard<std::mutex> lock(of.mutex);
  auto& now = of.statistics;
  now.kept -= rounded(bytes);
  now.allocated += rounded(bytes);
  ++now.allocations;
  now.peak_allocated = std::max(now.peak_allocated, now.allocated);
  now.watermark = std::max(now.watermark, present(now));
}

void* new_block(c10::DeviceIndex device, size_t bytes, PrivatePool* pool) {
  charge(device, bytes);
  void* base = nullptr;
  try {
    base = host_memory().raw_allocate(bytes + kHeader);
  } catch (...) {
    uncharge(device, bytes);
    throw;
  }
  auto* data = static_cast<char*>(base) + kHeader;
  header_of(data) = {static_cast<int64_t>(bytes), pool, device};
  return data;
}

void delete_block(void* data) noexcept {
  uncharge(header_of(data).device, header_of(data).bytes);
  host_memory().raw_deallocate(base_of(data));
}

std::pair<c10::DeviceIndex, int64_t> block_size(const void* data) {
  return {header_of(data).device, header_of(data).bytes};
}

PrivatePool* private_pool_of(const c10::DataPtr& memory) {
  if (memory.get_deleter() == &release_block && memory.get()) return header_of(memory.get()).pool;
  if (memory.get_deleter() == &release_adopted)
    return private_pool_of(static_cast<Adopted*>(memory.get_context())->host->data_ptr());
  if (memory.get_deleter() == &release_pool_use) return static_cast<PoolUse*>(memory.get_context())->get();
  return nullptr;
}

c10::DataPtr without_owner(const c10::DataPtr& memory) {
  auto* pool = private_pool_of(memory);
  TORCH_INTERNAL_ASSERT(pool, "only memory of a private pool outlives its owner");
  return {memory.get(), new PoolUse(pool->shared_from_this()), &release_pool_use, memory.device()};
}

c10::Allocator* device_allocator() { return &the_device_allocator; }

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes) {
  initialize();
  return charged_block(device, bytes, c10::Device(kNpu, device));
}

ChargeScope::ChargeScope(c10::DeviceIndex device) noexcept : outer_(std::exchange(charged_device, device)) {}
ChargeScope::~ChargeScope() { charged_device = outer_; }

c10::DataPtr adopt(const c10::intrusive_ptr<c10::StorageImpl>& host, c10::DeviceIndex device) {
  const c10::Device on(kNpu, device);
  const auto bytes = host->nbytes();
  void* data = host->mutable_data();
  if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, on};
  TORCH_CHECK_NOT_IMPLEMENTED(data, "results without memory are not emulated on the NPU");
  const auto& memory = host->data_ptr();
  const bool block = memory.get_deleter() == &release_block;
  // The caller and the tensor that it adopts hold the storage; anybody else would be left without its memory.
  if (host.use_count() <= 2 && (block ? header_of(data).device == device : pool::owns(memory))) {
    auto taken = std::move(host->_mutable_data_ptr_no_checks());
    taken.unsafe_set_device(on);
    return taken;
  }
  const auto uncharged_bytes = block || pool::owns(memory) ? 0 : bytes;
  if (uncharged_bytes) charge(device, uncharged_bytes);
  return {data, new Adopted{host, device, uncharged_bytes}, &release_adopted, on};
}

}  // namespace npu
