#include "block_file.h"

#include "headers.h"

#if NPU_EMULATOR_CANN_9
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "runtime.h"

namespace cann {
namespace {

constexpr size_t kSmallestShared = size_t{1} << 20;  // the caching allocator shares segments, of 2 MiB and more
constexpr size_t kPage = 4096;
constexpr size_t kKeyBytes = 65;  // what CANN asks callers to make room for

// The place of a block in its process's file. Places are not reused: the file has holes where blocks were freed.
struct Part {
  pid_t process;
  int file;
  off_t begin;
  size_t bytes;
};
struct Import {
  void* address;
  size_t bytes;
  int count;
};

struct Blocks {
  std::mutex mutex;
  pid_t process = 0;  // that made the file: a forked process makes its own
  int file = -1;
  off_t end = 0;
  std::map<const void*, Part> parts;
  std::map<std::string, Import> imports;
};
Blocks& blocks() {
  static auto* one = new Blocks();  // outlives tensors that are freed at the end of the process
  return *one;
}

bool open_file(Blocks& all) {
  if (all.process == getpid()) return all.file >= 0;
  all.process = getpid();
  all.file = memfd_create("npu_emulator_blocks", MFD_CLOEXEC);
  all.end = 0;
  return all.file >= 0;
}

std::string key_of(const Part& part) {
  return std::to_string(part.process) + " " + std::to_string(part.file) + " " + std::to_string(part.begin) + " " +
         std::to_string(part.bytes);
}

// Maps a block of another process, or of this one; null where it is gone.
void* map_part(const Part& part) {
  const auto path = "/proc/" + std::to_string(part.process) + "/fd/" + std::to_string(part.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* address = mmap(nullptr, part.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, part.begin);
  close(file);
  return address == MAP_FAILED ? nullptr : address;
}

aclError refuse(const std::string& words) { return fail(ACL_ERROR_RT_PARAM_INVALID, words); }

}  // namespace

void* allocate_in_file(size_t bytes) {
  if (bytes < kSmallestShared) return nullptr;
  const size_t size = (bytes + kPage - 1) / kPage * kPage;
  auto& all = blocks();
  std::lock_guard<std::mutex> guard(all.mutex);
  if (!open_file(all) || ftruncate(all.file, all.end + static_cast<off_t>(size))) return nullptr;
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, all.file, all.end);
  if (address == MAP_FAILED) return nullptr;
  all.parts[address] = {all.process, all.file, all.end, size};
  all.end += static_cast<off_t>(size);
  return address;
}

bool free_in_file(void* address) {
  auto& all = blocks();
  std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.parts.extract(address);
  if (!found) return false;
  const auto& part = found.mapped();
  munmap(address, part.bytes);
  // A forked process leaves its parent's memory alone.
  if (part.process == getpid())
    fallocate(part.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, part.begin, static_cast<off_t>(part.bytes));
  return true;
}

bool is_imported(const void* address) {
  auto& all = blocks();
  std::lock_guard<std::mutex> guard(all.mutex);
  for (const auto& [key, import] : all.imports) {
    const auto* begin = static_cast<const char*>(import.address);
    if (address >= begin && address < begin + import.bytes) return true;
  }
  return false;
}

}  // namespace cann

using namespace cann;

// The key of a whole block, which another process imports it by.
CANN_API aclError aclrtIpcMemGetExportKey(void* address, size_t bytes, char* key, size_t room, uint64_t) {
  auto& all = blocks();
  std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.parts.find(address);
  if (found == all.parts.end() || bytes > found->second.bytes)
    return refuse("aclrtIpcMemGetExportKey of an address where no block of 1 MiB or more begins, or of more than it");
  if (!key || room < kKeyBytes) return refuse("aclrtIpcMemGetExportKey: a key takes 65 bytes");
  std::memset(key, 0, room);
  std::snprintf(key, room, "%s", key_of(found->second).c_str());
  return ACL_SUCCESS;
}
// Which processes may import a key. All may: torch_npu switches this check off.
CANN_API aclError aclrtIpcMemSetImportPid(const char*, int32_t*, size_t) { return ACL_SUCCESS; }
CANN_API aclError aclrtIpcMemImportByKey(void** address, const char* key, uint64_t) {
  Part part{};
  long begin = 0;
  if (!address || !key || std::sscanf(key, "%d %d %ld %zu", &part.process, &part.file, &begin, &part.bytes) != 4)
    return refuse("aclrtIpcMemImportByKey: not a key of a block");
  part.begin = begin;
  auto& all = blocks();
  std::lock_guard<std::mutex> guard(all.mutex);
  auto& import = all.imports[key];
  if (!import.count) {
    void* mapped = map_part(part);
    if (!mapped) {
      all.imports.erase(key);
      return refuse("aclrtIpcMemImportByKey: process " + std::to_string(part.process) + " does not run here");
    }
    import = {mapped, part.bytes, 0};
  }
  ++import.count;
  *address = import.address;
  return ACL_SUCCESS;
}
// Called by a process that has imported the key, which forgets the block, and by the one that made the key.
CANN_API aclError aclrtIpcMemClose(const char* key) {
  auto& all = blocks();
  std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = key ? all.imports.find(key) : all.imports.end();
  if (found == all.imports.end() || --found->second.count) return ACL_SUCCESS;
  munmap(found->second.address, found->second.bytes);
  all.imports.erase(found);
  return ACL_SUCCESS;
}

#else

namespace cann {
void* allocate_in_file(size_t) { return nullptr; }
bool free_in_file(void*) { return false; }
bool is_imported(const void*) { return false; }
}  // namespace cann

#endif
