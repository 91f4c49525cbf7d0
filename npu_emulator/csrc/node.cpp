#include "node.h"

#include <c10/util/Exception.h>
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>

#include "device.h"

namespace npu::node {
namespace {

constexpr int kMaxProcesses = 128;
constexpr const char* kFolder = "/dev/shm/";

struct Process {
  int64_t id;
  int64_t started;  // clock ticks since boot: tells a process from a later one with the same number
};

// The content of the file. All zeros is a node without processes, and every change is one store, so a process that is
// killed at any moment leaves it valid.
struct Shares {
  std::array<Process, kMaxProcesses> processes;
  std::array<std::array<std::atomic<int64_t>, kMaxProcesses>, kMaxDevices> bytes;  // by die and process
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

// The kernel's status of a process, from its state on; empty if there is no such process.
std::istringstream status_of(int64_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return {};
  const auto name_end = text.rfind(')');  // the name of the program may hold anything
  return std::istringstream(name_end == std::string::npos ? "" : text.substr(name_end + 1));
}

// When a process started, or nothing if it does not live; a dead one whose parent has not waited for it does not.
std::optional<int64_t> start_of(int64_t process) {
  auto fields = status_of(process);
  std::string field;
  if (!(fields >> field) || field == "Z" || field == "X") return std::nullopt;
  constexpr int kStartTime = 22, kState = 3;
  for (int number = kState; number < kStartTime; ++number) fields >> field;
  return std::strtoll(field.c_str(), nullptr, 10);
}

// Whether a process was stopped, by SIGSTOP or a debugger.
bool is_stopped(int64_t process) {
  auto fields = status_of(process);
  std::string state;
  return fields >> state && (state == "T" || state == "t");
}

// The process that has the lock of an open file, from lines such as "7: FLOCK ADVISORY WRITE 4711 00:1a:42 0 EOF", in
// which 42 is the number of the file; 0 if the kernel lists none.
int64_t holder_of_lock(int file) {
  struct stat status;
  if (fstat(file, &status) != 0) return 0;
  const auto place = ":" + std::to_string(status.st_ino);
  std::ifstream locks("/proc/locks");
  std::string line, number, kind, mode, access, where;
  while (std::getline(locks, line)) {
    std::istringstream fields(line);
    int64_t process = 0;
    if (!(fields >> number >> kind >> mode >> access >> process >> where) || kind != "FLOCK") continue;
    if (where.size() > place.size() && where.compare(where.size() - place.size(), place.size(), place) == 0)
      return process;
  }
  return 0;
}

bool lives(const Process& process) { return process.id && start_of(process.id) == process.started; }

enum class Patience { none, unless_stopped, endless };

// The file's lock. The kernel gives it back when its holder dies. A holder that was stopped keeps it: whoever changes
// its own account only goes on without it then, since a rank that hangs on a device does not stop the others' memory.
class FileLock {
 public:
  FileLock(int file, Patience patience) : file_(file) {
    constexpr int kPauseMicroseconds = 50, kPausesBetweenLooks = 200;
    for (int pauses = 1; flock(file, LOCK_EX | LOCK_NB) != 0; ++pauses) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK || patience == Patience::none) return;
      if (patience == Patience::unless_stopped && pauses % kPausesBetweenLooks == 0 &&
          is_stopped(holder_of_lock(file)))
        return;
      usleep(kPauseMicroseconds);
    }
    held_ = true;
  }
  ~FileLock() {
    if (held_) flock(file_, LOCK_UN);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  bool held() const { return held_; }

 private:
  int file_;
  bool held_ = false;
};

class SharesFile {
 public:
  SharesFile(const std::string& path, int flags) : file_(open(path.c_str(), flags | O_RDWR | O_CLOEXEC, 0600)) {}
  ~SharesFile() {
    if (shares_) munmap(shares_, sizeof(Shares));
    if (file_ >= 0) close(file_);
  }
  SharesFile(const SharesFile&) = delete;
  SharesFile& operator=(const SharesFile&) = delete;

  int descriptor() const { return file_; }
  Shares& shares() { return *shares_; }

  // Under the lock. False if the file is gone from its folder, so that others would not find it.
  bool is_found() const {
    struct stat status;
    return fstat(file_, &status) == 0 && status.st_nlink > 0;
  }
  // Under the lock. Gives a new file its size.
  bool map() {
    if (posix_fallocate(file_, 0, sizeof(Shares)) != 0) return false;
    auto* memory = mmap(nullptr, sizeof(Shares), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory != MAP_FAILED) shares_ = static_cast<Shares*>(memory);
    return shares_ != nullptr;
  }

 private:
  int file_;
  Shares* shares_ = nullptr;
};

// With the version of the layout, and the process namespace: containers may share /dev/shm, but number processes anew.
std::string name_prefix() {
  struct stat numbering {};
  stat("/proc/self/ns/pid", &numbering);
  return "npu_emulator-1-" + std::to_string(numbering.st_ino) + "-" + std::to_string(getuid()) + "-";
}

std::string path_of_node() {
  const char* given = std::getenv("NPU_EMULATOR_NODE");
  const std::string name = given && *given ? given : "default";
  const auto allowed = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("._-", c); };
  TORCH_CHECK(name.size() <= 100 && std::all_of(name.begin(), name.end(), allowed),
              "NPU_EMULATOR_NODE must be at most 100 letters, digits, dots, underscores and dashes, not '", name, "'");
  return kFolder + name_prefix() + name;
}

void forget_dead_processes(Shares& shares) {
  for (int index = 0; index < kMaxProcesses; ++index) {
    auto& process = shares.processes[index];
    if (!process.id || lives(process)) continue;
    for (auto& of_die : shares.bytes) of_die[index] = 0;
    process.id = 0;
  }
}

// This process's place in its node.
class Membership {
 public:
  Membership() : path_(path_of_node()) {
    do {
      file_.emplace(path_, O_CREAT);
      TORCH_CHECK(file_->descriptor() >= 0, "cannot open ", path_, ", which the processes on the emulated NPUs share: ",
                  std::strerror(errno));
    } while (!enter());
  }

  std::atomic<int64_t>& own_bytes(int die) { return file_->shares().bytes[die][index_]; }

  bool reserve(int die, int64_t bytes, int64_t capacity) {
    const FileLock lock(file_->descriptor(), Patience::unless_stopped);
    if (total(die) + bytes > capacity) {
      forget_dead_processes(file_->shares());
      if (total(die) + bytes > capacity) return false;
    }
    own_bytes(die) += bytes;
    return true;
  }

  std::vector<Holder> holders(int die) {
    const FileLock lock(file_->descriptor(), Patience::unless_stopped);
    auto& shares = file_->shares();
    forget_dead_processes(shares);
    std::vector<Holder> all;
    for (int index = 0; index < kMaxProcesses; ++index)
      if (const int64_t bytes = shares.bytes[die][index])
        all.push_back({static_cast<pid_t>(shares.processes[index].id), bytes});
    return all;
  }

  void leave() {
    const FileLock lock(file_->descriptor(), Patience::unless_stopped);
    for (auto& of_die : file_->shares().bytes) of_die[index_] = 0;
    file_->shares().processes[index_].id = 0;
  }

 private:
  // False if the file was removed before it could be locked.
  bool enter() {
    const FileLock lock(file_->descriptor(), Patience::endless);
    if (!file_->is_found()) return false;
    TORCH_CHECK(file_->map(), "cannot map ", path_, ", which the processes on the emulated NPUs share");
    auto& shares = file_->shares();
    forget_dead_processes(shares);
    const Process self{getpid(), start_of(getpid()).value_or(0)};
    const auto is = [](int64_t id) { return [id](const Process& process) { return process.id == id; }; };
    // A process that began anew with exec finds its place of before.
    auto place = std::find_if(shares.processes.begin(), shares.processes.end(), is(self.id));
    if (place == shares.processes.end())
      place = std::find_if(shares.processes.begin(), shares.processes.end(), is(0));
    TORCH_CHECK(place != shares.processes.end(), "more than ", kMaxProcesses, " processes use the emulated NPUs");
    index_ = static_cast<int>(place - shares.processes.begin());
    for (auto& of_die : shares.bytes) of_die[index_] = 0;
    place->started = self.started;
    place->id = self.id;
    return true;
  }

  int64_t total(int die) {
    int64_t sum = 0;
    for (const auto& of_process : file_->shares().bytes[die]) sum += of_process.load(std::memory_order_relaxed);
    return sum;
  }

  std::string path_;
  std::optional<SharesFile> file_;
  int index_ = 0;
};

struct Member {
  std::mutex mutex;
  Membership* membership = nullptr;
  pid_t owner = 0;
  bool left = false;
};

Member& member() {
  static auto* one = new Member();
  return *one;
}

// Under the mutex. A process joins with the first memory that it takes, a forked one for itself.
Membership* joined() {
  auto& self = member();
  if (self.left) return nullptr;
  if (!self.membership || self.owner != getpid()) {
    self.membership = new Membership();
    self.owner = getpid();
  }
  return self.membership;
}

void remove_if_unused(const std::string& path) {
  SharesFile file(path, 0);
  if (file.descriptor() < 0) return;
  const FileLock lock(file.descriptor(), Patience::none);
  if (!lock.held() || !file.is_found() || !file.map()) return;
  const auto& processes = file.shares().processes;
  if (std::none_of(processes.begin(), processes.end(), lives)) unlink(path.c_str());
}

void remove_unused_files() {
  auto* folder = opendir(kFolder);
  if (!folder) return;
  const auto prefix = name_prefix();
  while (const auto* entry = readdir(folder))
    if (std::strncmp(entry->d_name, prefix.c_str(), prefix.size()) == 0)
      remove_if_unused(std::string(kFolder) + entry->d_name);
  closedir(folder);
}

}  // namespace

bool reserve(int die, int64_t bytes, int64_t capacity) {
  std::lock_guard<std::mutex> lock(member().mutex);
  auto* membership = joined();
  return !membership || membership->reserve(die, bytes, capacity);
}

void release(int die, int64_t bytes) noexcept {
  std::lock_guard<std::mutex> lock(member().mutex);
  auto& self = member();
  if (self.membership && !self.left && self.owner == getpid()) self.membership->own_bytes(die) -= bytes;
}

std::vector<Holder> holders(int die) {
  std::lock_guard<std::mutex> lock(member().mutex);
  auto* membership = joined();
  return membership ? membership->holders(die) : std::vector<Holder>();
}

void leave() noexcept {
  auto& self = member();
  if (self.membership && self.owner != getpid()) return;
  std::lock_guard<std::mutex> lock(self.mutex);
  self.left = true;
  if (self.membership) self.membership->leave();
  remove_unused_files();
}

}  // namespace npu::node
