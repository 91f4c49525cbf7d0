#include "shared_group.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>

#include "device.h"
#include "die_memory.h"
#include "headers.h"
#include "runtime.h"

namespace cann {

namespace {

std::mutex groups_mutex;

std::map<std::string, SharedGroup*>& groups() {
  static auto* all = new std::map<std::string, SharedGroup*>();
  return *all;
}

using Clock = std::chrono::steady_clock;

double seconds(const char* variable, double otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::atof(text) : otherwise;
}

// A process that has ended and that its parent has not waited for does not live. One that was never seen may.
bool lives(pid_t process) {
  if (process == 0) return true;
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return false;
  const auto state = text.find_first_not_of(' ', text.rfind(')') + 1);
  return state != std::string::npos && text[state] != 'Z' && text[state] != 'X';
}

int open_of(pid_t process, int file) {
  const auto path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(opened >= 0, "HCCL: cannot open the memory of process ", process, ": ", std::strerror(errno));
  return opened;
}

char* map_shared(int file, size_t bytes, size_t from = 0) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(from));
  TORCH_CHECK(data != MAP_FAILED, "HCCL: cannot map ", bytes, " bytes: ", std::strerror(errno));
  return static_cast<char*>(data);
}

// A die of a node, as one number: nodes are told apart by their names.
size_t place_of(int die) {
  const char* node = std::getenv("NPU_EMULATOR_NODE");
  return std::hash<std::string>()(std::string(node ? node : "default") + "/" + std::to_string(die));
}

// The size to map for `bytes` bytes, with a margin so that somewhat more fits the next time.
size_t with_room(size_t bytes) {
  constexpr size_t kGrain = 65536;
  return (bytes + bytes / 4) / kGrain * kGrain + kGrain;
}

// In the file of a meeting: the state, and then a stretch for each pair of a sender and a receiver. Only pages that are
// written take memory.
constexpr size_t kStateBytes = size_t{1} << 20;
constexpr size_t kChannelBytes = size_t{1} << 37;

}  // namespace

// All zeros to begin with. A rank changes only what is its own, and `wakes`.
struct SharedGroup::State {
  std::atomic<uint32_t> wakes;
  std::atomic<pid_t> process[kMaxRanks];
  std::atomic<size_t> place[kMaxRanks];          // its node and die
  std::atomic<uint64_t> arrived[kMaxRanks];      // meetings that the rank has come to
  char latest[kMaxRanks][48];                    // what it came to last
  std::atomic<int> file[kMaxRanks][2];           // of its memory, by the parity of the exchange, plus one
  std::atomic<uint64_t> bytes[kMaxRanks][2];     // that it gave
  char call[kMaxRanks][2][96];                   // with the arguments that have to be those of all ranks
  struct Channel {
    std::atomic<uint64_t> bytes, sent, received;
  } channel[kMaxRanks][kMaxRanks];  // by sender and receiver
};

Meeting make_meeting() {
  const int file = memfd_create("npu_emulator_hccl", MFD_CLOEXEC);
  constexpr off_t kBytes = kStateBytes + kMaxRanks * kMaxRanks * kChannelBytes;
  TORCH_CHECK(file >= 0 && ftruncate(file, kBytes) == 0, "HCCL: no shared memory: ", std::strerror(errno));
  static std::atomic<int> made{0};
  return {getpid(), file, ++made};
}

SharedGroup::SharedGroup(Meeting meeting, int its_ranks, int its_rank, size_t buffer_bytes)
    : ranks(its_ranks),
      rank(its_rank),
      name(std::to_string(meeting.process) + "-" + std::to_string(meeting.number)),
      die_(die_of(std::max(chosen_device(), 0))),
      buffer_bytes_(buffer_bytes) {
  static_assert(sizeof(State) <= kStateBytes);
  TORCH_CHECK(ranks <= kMaxRanks, "HCCL: groups of more than ", kMaxRanks, " ranks are not emulated");
  const bool is_mine = meeting.process == getpid();
  file_ = is_mine ? meeting.file : open_of(meeting.process, meeting.file);
  state_ = reinterpret_cast<State*>(map_shared(file_, sizeof(State)));
  state_->process[rank] = getpid();
  state_->place[rank] = place_of(die_);
  try {
    meet("HcclCommInitRootInfo");
    check_places();
  } catch (...) {
    close(file_);
    munmap(state_, sizeof(State));
    throw;
  }
  std::lock_guard<std::mutex> guard(groups_mutex);
  groups()[name] = this;
}

SharedGroup::~SharedGroup() {
  {
    std::lock_guard<std::mutex> guard(groups_mutex);
    groups().erase(name);
  }
  for (auto* all : {&areas_, &channels_})
    for (auto& [key, area] : *all) {
      if (area.data) munmap(area.data, area.size);
      if (area.file >= 0) close(area.file);
    }
  munmap(state_, sizeof(State));
  close(file_);
  if (has_buffers_) give_back_beside_programs(die_, 2 * buffer_bytes_);
}

// HCCL takes one rank of a device (EI0014). With CANN 8.2 it is let pass here, as programs of the pins may do so.
void SharedGroup::check_places() const {
  for (int other = 0; NPU_EMULATOR_CANN_9 && other < ranks; ++other)
    TORCH_CHECK(other == rank || state_->place[other] != state_->place[rank], "EI0014: ranks ", std::min(other, rank),
                " and ", std::max(other, rank), " of a communicator are on the same device, die ", die_,
                ", and HCCL takes one rank of a device");
}

// HCCL's documents have it compare arguments where it connects ranks (EI0005), and nothing between ranks that are
// connected, which then presumably hang. Here every call is compared, and is rejected or hangs
// (NPU_EMULATOR_UNLIKE_COLLECTIVES).
void SharedGroup::check_arguments(const char* what, int parity) {
  const char* own = state_->call[rank][parity];
  std::vector<int> unlike;
  for (int other = 0; other < ranks; ++other)
    if (std::strcmp(own, state_->call[other][parity])) unlike.push_back(other);
  if (unlike.empty()) return;
  const char* chosen = std::getenv("NPU_EMULATOR_UNLIKE_COLLECTIVES");
  if (chosen && !std::strcmp(chosen, "hang")) wait(what, [] { return false; }, [&] { return unlike; });
  TORCH_CHECK(false, "EI0005: the arguments for collective communication are inconsistent between ranks: rank ", rank,
              " calls ", own, ", rank ", unlike[0], " ", state_->call[unlike[0]][parity]);
}

bool SharedGroup::has_buffers() {
  static const bool count = npu::environment_integer("NPU_EMULATOR_HCCL_BUFFERS", 0) != 0;
  if (!count || ranks == 1) return true;
  std::lock_guard<std::mutex> guard(buffers_mutex_);
  return has_buffers_ = has_buffers_ || take_beside_programs(die_, 2 * buffer_bytes_);
}

std::string SharedGroup::words_for_no_buffers() const {
  return "the two buffers of " + std::to_string(buffer_bytes_ >> 20) + " MiB of a communicator of " +
         std::to_string(ranks) + " ranks do not fit into what is left of die " + std::to_string(die_) +
         ": lower HCCL_BUFFSIZE";
}

char* SharedGroup::own_area(Area& area, std::atomic<int>& published, size_t bytes) {
  if (area.file < 0) {
    area.file = memfd_create("npu_emulator_hccl", MFD_CLOEXEC);
    TORCH_CHECK(area.file >= 0, "HCCL: no shared memory: ", std::strerror(errno));
    published = area.file + 1;
  }
  if (area.size >= bytes && area.data) return area.data;
  const size_t size = with_room(bytes);
  TORCH_CHECK(ftruncate(area.file, static_cast<off_t>(size)) == 0, "HCCL: no ", size, " bytes of shared memory");
  if (area.data) munmap(area.data, area.size);
  area.data = map_shared(area.file, size);
  area.size = size;
  return area.data;
}

const char* SharedGroup::area_of(Area& area, int owner, int file, size_t bytes) {
  if (area.file < 0) area.file = open_of(state_->process[owner], file - 1);
  if (area.size >= bytes && area.data) return area.data;
  if (area.data) munmap(area.data, area.size);
  area.size = static_cast<size_t>(lseek(area.file, 0, SEEK_END));
  area.data = map_shared(area.file, area.size);
  return area.data;
}

// In memory that every rank has open, so that a message is there when its sender has ended.
char* SharedGroup::channel_area(int sender, int receiver, size_t bytes) {
  auto& area = channels_[{sender, receiver}];
  if (area.size >= bytes && area.data) return area.data;
  TORCH_CHECK(bytes <= kChannelBytes, "HCCL: a message of ", bytes, " bytes, and at most ", kChannelBytes, " are emulated");
  if (area.data) munmap(area.data, area.size);
  area.size = std::min(with_room(bytes), kChannelBytes);
  area.data = map_shared(file_, area.size, kStateBytes + (sender * kMaxRanks + receiver) * kChannelBytes);
  return area.data;
}

void SharedGroup::wake() {
  ++state_->wakes;
  syscall(SYS_futex, &state_->wakes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void SharedGroup::wait(const char* what, const std::function<bool()>& is_done,
                       const std::function<std::vector<int>()>& missing) {
  constexpr int kYields = 50;
  constexpr timespec kNap{0, 100'000'000};
  const double limit = step_ <= 1 ? seconds("HCCL_CONNECT_TIMEOUT", 120) : seconds("HCCL_EXEC_TIMEOUT", 1836);
  const auto began = Clock::now();
  for (int round = 0;; ++round) {
    const uint32_t seen = state_->wakes;
    if (is_done()) return;
    if (round < kYields) {
      sched_yield();
      continue;
    }
    const double waited = std::chrono::duration<double>(Clock::now() - began).count();
    std::string report;
    bool is_hopeless = waited > limit;
    for (const int of : missing()) {
      const bool is_dead = !lives(state_->process[of]);
      is_hopeless |= is_dead;
      report += (report.empty() ? "rank " : ", rank ") + std::to_string(of);
      report += is_dead ? " (its process has ended" : " (";
      report += state_->latest[of][0] ? (is_dead ? ", last in " : "last in ") + std::string(state_->latest[of]) + ")"
                                      : std::string(is_dead ? ")" : "not seen yet)");
    }
    if (is_hopeless && !is_done())
      TORCH_CHECK_WITH(DistBackendError, false, what, " on rank ", rank, " of ", ranks, ": no answer after ", waited,
                       " s from ", report);
    syscall(SYS_futex, &state_->wakes, FUTEX_WAIT, seen, &kNap, nullptr, 0);
  }
}

void SharedGroup::meet(const char* what) {
  ++step_;
  std::strncpy(state_->latest[rank], what, sizeof state_->latest[rank] - 1);
  state_->arrived[rank] = step_;
  wake();
  const auto missing = [&] {
    std::vector<int> all;
    for (int of = 0; of < ranks; ++of)
      if (state_->arrived[of] < step_) all.push_back(of);
    return all;
  };
  wait(what, [&] { return missing().empty(); }, missing);
}

// Two areas in turn: a rank that comes to exchange k has read all of exchange k - 1, and may not yet have read k's own.
//
// A rank's data must outlive the rank: an open area stays, so when an area is first used, all ranks open it before any
// of them goes on. It may still grow.
void SharedGroup::exchange(const char* what, const std::string& arguments, size_t bytes, const Fill& fill,
                           const Read& read) {
  std::lock_guard<std::mutex> guard(one_at_a_time_);
  const int parity = static_cast<int>(++exchanges_ & 1);
  std::snprintf(state_->call[rank][parity], sizeof state_->call[rank][parity], "%s(%s)", what, arguments.c_str());
  fill(own_area(areas_[{rank, parity}], state_->file[rank][parity], std::max<size_t>(bytes, 1)));
  state_->bytes[rank][parity] = bytes;
  meet(what);
  if (exchanges_ <= 2) {
    for (int of = 0; of < ranks; ++of) given(of);
    meet(what);
  }
  check_arguments(what, parity);
  read();
}

const char* SharedGroup::given(int of) {
  const int parity = static_cast<int>(exchanges_ & 1);
  return area_of(areas_[{of, parity}], of, state_->file[of][parity], state_->bytes[of][parity]);
}

bool SharedGroup::try_send(const Message& message) {
  auto& channel = state_->channel[rank][message.peer];
  if (channel.received != channel.sent) return false;
  if (message.bytes) std::memcpy(channel_area(rank, message.peer, message.bytes), message.data, message.bytes);
  channel.bytes = message.bytes;
  ++channel.sent;
  wake();
  return true;
}

bool SharedGroup::try_receive(const Message& message) {
  auto& channel = state_->channel[message.peer][rank];
  if (channel.sent == channel.received) return false;
  const size_t bytes = channel.bytes;
  TORCH_CHECK(bytes == message.bytes, "HCCL: rank ", message.peer, " sends ", bytes, " bytes, and rank ", rank,
              " expects ", message.bytes);
  if (bytes) std::memcpy(message.data, channel_area(message.peer, rank, bytes), bytes);
  ++channel.received;
  wake();
  return true;
}

void SharedGroup::transfer(const char* what, const std::vector<Message>& messages) {
  std::lock_guard<std::mutex> guard(one_at_a_time_);
  std::strncpy(state_->latest[rank], what, sizeof state_->latest[rank] - 1);
  std::vector<const Message*> open;
  for (const auto& message : messages) open.push_back(&message);
  // Only the first open message between two ranks in one direction may be tried.
  const auto advance = [&] {
    std::vector<std::pair<bool, int>> blocked;
    open.erase(std::remove_if(open.begin(), open.end(),
                              [&](const Message* message) {
                                const std::pair<bool, int> lane{message->is_received, message->peer};
                                if (std::find(blocked.begin(), blocked.end(), lane) != blocked.end()) return false;
                                if (message->is_received ? try_receive(*message) : try_send(*message)) return true;
                                blocked.push_back(lane);
                                return false;
                              }),
               open.end());
    return open.empty();
  };
  wait(what, advance, [&] {
    std::vector<int> peers;
    for (const auto* message : open) peers.push_back(message->peer);
    return peers;
  });
}

SharedGroup& group_named(const std::string& name) {
  std::lock_guard<std::mutex> guard(groups_mutex);
  const auto found = groups().find(name);
  TORCH_CHECK(found != groups().end(), "no communicator ", name, " in this process");
  TORCH_CHECK(found->second->has_buffers(), found->second->words_for_no_buffers());
  return *found->second;
}

}  // namespace cann
