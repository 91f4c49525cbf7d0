// Device memory on the host, charged to the dies: plain blocks, and physical memory mapped into reserved addresses.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>

#include "block_file.h"
#include "device.h"
#include "die_memory.h"
#include "frames.h"
#include "headers.h"
#include "meters.h"
#include "node.h"
#include "runtime.h"
#include "streams.h"

using namespace cann;

namespace {

// Alignment of addresses. CANN promises 64 bytes; its pages are aligned to more.
constexpr size_t kAlignment = 512;
// aclrtMalloc rounds a size up to a multiple of these bytes and adds one more of them.
constexpr size_t kGrain = 32;

int64_t capacity() {
  static const int64_t bytes = npu::environment_integer("NPU_EMULATOR_CAPACITY_MB", 4096) << 20;
  return bytes;
}

int current_die() { return die_of(std::max(chosen_device(), 0)); }

// The bytes of a die that this process holds, how many of them are CANN's own, and how often it asked for memory.
struct Usage {
  std::atomic<int64_t> held{0}, beside_programs{0}, peak{0}, watermark{0}, allocations{0}, frees{0}, refusals{0};
};
Usage usages[npu::kMaxDevices];

void raise_to(std::atomic<int64_t>& highest, int64_t value) {
  auto before = highest.load();
  while (before < value && !highest.compare_exchange_weak(before, value)) {
  }
}

// Charges a die with frames; false, and nothing charged, where it has too few.
bool take_frames(int die, int64_t frames) {
  auto& usage = usages[die];
  const auto bytes = frames * static_cast<int64_t>(kFrameBytes);
  if (!npu::node::reserve(die, bytes, capacity())) return false;
  const auto held = usage.held += bytes;
  raise_to(usage.peak, held);
  raise_to(usage.watermark, held);
  return true;
}
void give_back_frames(int die, int64_t frames) {
  const auto bytes = frames * static_cast<int64_t>(kFrameBytes);
  npu::node::release(die, bytes);
  usages[die].held -= bytes;
}

Frames& frames_of(int die) {
  static auto* all = [] {
    auto* made = new std::array<std::unique_ptr<Frames>, npu::kMaxDevices>();
    for (int each = 0; each < npu::kMaxDevices; ++each)
      (*made)[each] = std::make_unique<Frames>([each](int64_t frames) { return take_frames(each, frames); },
                                               [each](int64_t frames) { give_back_frames(each, frames); });
    return made;
  }();
  return *(*all)[die];
}

// Memory of a die for one block, counted; none where the die has too little.
std::optional<Pages> charge(int die, size_t bytes, aclrtMemMallocPolicy policy) {
  auto pages = frames_of(die).take(bytes, policy);
  ++(pages ? usages[die].allocations : usages[die].refusals);
  return pages;
}
void discharge(int die, const Pages& pages) {
  frames_of(die).give_back(pages);
  ++usages[die].frees;
}

void count_copy(const void* to, const void* from, size_t bytes) {
  using npu::meters::Copy;
  const bool is_to_device = is_on_device(to), is_from_device = is_on_device(from);
  if (!is_to_device && !is_from_device) return;
  npu::meters::count_copy(!is_from_device ? Copy::kHostToDevice : is_to_device ? Copy::kDeviceToDevice : Copy::kDeviceToHost,
                          static_cast<int64_t>(bytes));
}

struct Block {
  int die;
  size_t bytes;
  Pages pages;
};

struct Physical {
  int die;
  Pages pages;
  int file;
};

class Ledger {
 public:
  void add(void* address, Block block) {
    std::lock_guard<std::mutex> guard(mutex_);
    blocks_[address] = std::move(block);
  }
  // The block that began at `address`, now forgotten; with 0 bytes if there is none.
  Block take(void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = blocks_.extract(address);
    return found ? std::move(found.mapped()) : Block{0, 0, {}};
  }
  // The die of the block that `address` lies in.
  std::optional<int> die_of(const void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto after = blocks_.upper_bound(const_cast<void*>(address));
    if (after == blocks_.begin()) return std::nullopt;
    const auto& [begin, block] = *--after;
    const bool is_inside = static_cast<const char*>(address) < static_cast<const char*>(begin) + block.bytes;
    return is_inside ? std::optional(block.die) : std::nullopt;
  }
  bool holds(const void* address) { return die_of(address).has_value(); }

 private:
  std::mutex mutex_;
  std::map<void*, Block> blocks_;
};

Ledger& device_blocks() {
  static auto* one = new Ledger();  // outlives tensors that are freed at the end of the process
  return *one;
}
Ledger& reserved_addresses() {
  static auto* one = new Ledger();
  return *one;
}
Ledger& mappings() {
  static auto* one = new Ledger();
  return *one;
}

// Memory of the host that stays where it is.
Ledger& pinned_blocks() {
  static auto* one = new Ledger();
  return *one;
}

// Whether a copy may be captured: a replay finds what lies on devices and in pinned memory.
aclError check_captured_copy(const void* to, const void* from, void* stream) {
  const auto stays = [](const void* address) { return is_on_device(address) || pinned_blocks().holds(address); };
  if (!is_capturing(stream) || (stays(to) && stays(from))) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpyAsync on a stream that is being captured, with host memory that is "
                                          "not pinned");
}
// Whether this thread may copy or fill memory at once.
aclError check_at_once(const char* function) {
  if (!forbids_copies_at_once()) return ACL_SUCCESS;
  return fail(kNotInThisMode, std::string(function) + " while a stream is being captured in a mode that is not relaxed");
}

aclError refuse_memory(size_t bytes, int die) {
  return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
              std::to_string(bytes) + " bytes do not fit into what is left of the " + std::to_string(capacity() >> 20) +
                  " MiB of die " + std::to_string(die) + " (NPU_EMULATOR_CAPACITY_MB)");
}

// `more` bytes are added to what is asked for, in multiples of kGrain.
aclError allocate(void** address, size_t bytes, size_t more, aclrtMemMallocPolicy policy) {
  if (!address || !bytes) return fail(ACL_ERROR_INVALID_PARAM, "aclrtMalloc of nothing, or to nowhere");
  const int die = current_die();
  const size_t size = (bytes + kGrain - 1) / kGrain * kGrain + more;
  auto pages = charge(die, size, policy);
  if (!pages) return refuse_memory(bytes, die);
  *address = allocate_in_file(size);
  if (!*address && posix_memalign(address, kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment)) {
    discharge(die, *pages);
    return refuse_memory(bytes, die);
  }
  device_blocks().add(*address, {die, size, std::move(*pages)});
  return ACL_SUCCESS;
}

}  // namespace

bool cann::is_on_device(const void* address) {
  return device_blocks().holds(address) || reserved_addresses().holds(address) || is_imported(address);
}

bool cann::take_beside_programs(int die, size_t bytes) {
  const auto frames = static_cast<int64_t>((bytes + kFrameBytes - 1) / kFrameBytes);
  if (!take_frames(die, frames)) return false;
  usages[die].beside_programs += frames * static_cast<int64_t>(kFrameBytes);
  return true;
}
void cann::give_back_beside_programs(int die, size_t bytes) {
  const auto frames = static_cast<int64_t>((bytes + kFrameBytes - 1) / kFrameBytes);
  give_back_frames(die, frames);
  usages[die].beside_programs -= frames * static_cast<int64_t>(kFrameBytes);
}

CANN_API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  int64_t held = 0;
  for (const auto& holder : npu::node::holders(current_die())) held += holder.bytes;
  *total = static_cast<size_t>(capacity());
  *free = held < capacity() ? static_cast<size_t>(capacity() - held) : 0;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy policy) {
  return allocate(address, bytes, kGrain, policy);
}
CANN_API aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy policy) {
  return allocate(address, bytes, 0, policy);
}
CANN_API aclError aclrtFree(void* address) {
  if (!address) return ACL_SUCCESS;
  const auto block = device_blocks().take(address);
  if (!block.bytes) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree of an address that aclrtMalloc did not return");
  if (!free_in_file(address)) std::free(address);
  discharge(block.die, block.pages);
  return ACL_SUCCESS;
}

CANN_API aclError aclrtMallocHost(void** address, size_t bytes) {
  if (posix_memalign(address, 4096, bytes ? bytes : 1)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  pinned_blocks().add(*address, {0, bytes, {}});
  return ACL_SUCCESS;
}
CANN_API aclError aclrtFreeHost(void* address) {
  pinned_blocks().take(address);
  std::free(address);
  return ACL_SUCCESS;
}
CANN_API aclError aclrtHostRegister(void* host, uint64_t bytes, aclrtHostRegisterType, void** device) {
  pinned_blocks().add(host, {0, bytes, {}});
  *device = host;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtHostUnregister(void* host) {
  pinned_blocks().take(host);
  return ACL_SUCCESS;
}

#if NPU_EMULATOR_CANN_9
CANN_API aclError aclrtHostRegisterV2(void* host, uint64_t bytes, uint32_t) {
  if (!host || !bytes) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostRegisterV2: no memory is given");
  pinned_blocks().add(host, {0, bytes, {}});
  return ACL_SUCCESS;
}
CANN_API aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  *attributes = {};
  auto die = device_blocks().die_of(address);
  if (!die) die = mappings().die_of(address);
  if (!die && is_imported(address)) die = current_die();
  if (die) attributes->location = {static_cast<uint32_t>(device_on(*die)), ACL_MEM_LOCATION_TYPE_DEVICE};
  else if (pinned_blocks().holds(address)) attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
  else attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}
#endif

CANN_API aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind) {
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpy of more bytes than there is room for");
  if (const auto refused = check_at_once("aclrtMemcpy")) return refused;
  count_copy(to, from, bytes);
  std::memmove(to, from, bytes);
  return ACL_SUCCESS;
}
CANN_API aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind,
                                   aclrtStream stream) {
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpyAsync of more bytes than there is room for");
  if (const auto refused = check_captured_copy(to, from, stream)) return refused;
  submit(stream, "aclrtMemcpyAsync", [=] {
    count_copy(to, from, bytes);
    std::memmove(to, from, bytes);
  });
  return ACL_SUCCESS;
}
#if NPU_EMULATOR_CANN_9
// Many copies at once, in their order; the first that cannot be done is told by its number.
CANN_API aclError aclrtMemcpyBatchAsync(void** to, size_t* rooms, void** from, size_t* sizes, size_t count,
                                        aclrtMemcpyBatchAttr*, size_t*, size_t, size_t* failed, aclrtStream stream) {
  for (size_t index = 0; index < count; ++index) {
    const auto code =
        aclrtMemcpyAsync(to[index], rooms[index], from[index], sizes[index], ACL_MEMCPY_DEFAULT, stream);
    if (failed) *failed = code ? index : ~size_t{0};
    if (code) return code;
  }
  return ACL_SUCCESS;
}
#endif
CANN_API aclError aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemset of more bytes than there is room for");
  if (const auto refused = check_at_once("aclrtMemset")) return refused;
  std::memset(to, value, bytes);
  return ACL_SUCCESS;
}
CANN_API aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemsetAsync of more bytes than there is room for");
  submit(stream, "aclrtMemsetAsync", [=] { std::memset(to, value, bytes); });
  return ACL_SUCCESS;
}
CANN_API aclError aclrtCmoAsync(void*, size_t, aclrtCmoType, aclrtStream) { return ACL_SUCCESS; }  // a cache hint

// Expandable segments: addresses are reserved, and physical memory is mapped into them and taken out again.
CANN_API aclError aclrtReserveMemAddress(void** address, size_t bytes, size_t, void*, uint64_t) {
  *address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*address == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no addresses are left to reserve");
  reserved_addresses().add(*address, {0, bytes, {}});
  return ACL_SUCCESS;
}
CANN_API aclError aclrtReleaseMemAddress(void* address) {
  const auto block = reserved_addresses().take(address);
  if (!block.bytes) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtReleaseMemAddress of what is not reserved");
  munmap(address, block.bytes);
  return ACL_SUCCESS;
}
CANN_API aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, aclrtMemGranularityOptions, size_t* bytes) {
  *bytes = kFrameBytes;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* properties,
                                      uint64_t) {
  if (!bytes) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMallocPhysical of nothing");
  const bool is_on_device = properties && properties->location.type == ACL_MEM_LOCATION_TYPE_DEVICE;
  const int die = is_on_device ? die_of(static_cast<int>(properties->location.id)) : current_die();
  auto pages = charge(die, bytes, ACL_MEM_MALLOC_HUGE_ONLY);
  if (!pages) return refuse_memory(bytes, die);
  const int file = memfd_create("npu_emulator", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) {
    if (file >= 0) close(file);
    discharge(die, *pages);
    return refuse_memory(bytes, die);
  }
  *handle = new Physical{die, std::move(*pages), file};
  return ACL_SUCCESS;
}
CANN_API aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* physical = static_cast<Physical*>(handle);
  close(physical->file);
  discharge(physical->die, physical->pages);
  delete physical;
  return ACL_SUCCESS;
}
CANN_API aclError aclrtMapMem(void* address, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  const auto* physical = static_cast<Physical*>(handle);
  const auto* mapped = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->file,
                            static_cast<off_t>(offset));
  if (mapped != address) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMapMem could not map physical memory");
  mappings().add(address, {physical->die, bytes, {}});
  return ACL_SUCCESS;
}
CANN_API aclError aclrtUnmapMem(void* address) {
  const auto block = mappings().take(address);
  if (!block.bytes) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtUnmapMem of an address where nothing is mapped");
  mmap(address, block.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return ACL_SUCCESS;
}

CANN_API void npu_emulator_cann_memory(int device, int64_t numbers[7]) {
  const auto& usage = usages[die_of(device)];
  const std::array<int64_t, 7> now{capacity(), usage.held,  usage.peak,           usage.allocations,
                                   usage.frees, usage.refusals, usage.beside_programs};
  std::copy(now.begin(), now.end(), numbers);
}
// The most that this process has held of a device since the last call; from now on counted from `lowest`, or what it holds.
CANN_API int64_t npu_emulator_cann_exchange_watermark(int device, int64_t lowest) {
  auto& usage = usages[die_of(device)];
  return usage.watermark.exchange(std::max(lowest, usage.held.load()));
}

// At the end of a process: its share of the dies is free again, and files that nobody uses are removed.
CANN_API void npu_emulator_cann_leave() {
  stop_stream_threads();
  npu::node::leave();
}
