// A group of processes of one machine that hand memory to each other: what HCCL is emulated with.
//
// Each rank writes what it gives into memory of its own, the ranks meet, and each reads what the others gave. Messages
// between two of them lie in memory that all have open since they met. The memory has no name: a rank opens another's
// through /proc/<pid>/fd, so that nothing is left of one that is killed.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace cann {

constexpr int kMaxRanks = 64;

// The place of the state that all ranks share: one rank makes it and tells the others through their connection.
struct Meeting {
  pid_t process;
  int file;
  int number;  // of those that the process has made, which tells groups apart: a file's number is used again
};
Meeting make_meeting();

class SharedGroup {
 public:
  // Waits for all ranks. Throws c10::Error, naming the ranks that did not come. `buffer_bytes` is the size of one of the two
  // buffers that the group takes of the calling thread's die at its first collective (NPU_EMULATOR_HCCL_BUFFERS).
  SharedGroup(Meeting meeting, int ranks, int rank, size_t buffer_bytes);
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  const int ranks, rank;
  const std::string name;

  // Whether the group has its buffers; takes them if it has not yet. False where the die has too little memory. A group
  // of one rank only copies (HCCL's executors for one), and is taken to need none.
  bool has_buffers();
  std::string words_for_no_buffers() const;

  // One collective: gives `bytes` bytes, which `fill` writes, waits until every rank gave its own, and lets `read` look
  // at what any rank gave until it returns. `arguments` are those that all ranks have to give alike: where they or `what`
  // differ, throws c10::Error on every rank.
  using Fill = std::function<void(char* area)>;
  using Read = std::function<void()>;
  void exchange(const char* what, const std::string& arguments, size_t bytes, const Fill& fill, const Read& read);
  // During `read`: what `of` gave.
  const char* given(int of);

  struct Message {
    bool is_received;
    void* data;
    size_t bytes;
    int peer;
  };
  // Sends and receives all of them, in whatever order the peers are ready. A message waits for its receiver, also when
  // the sender has ended, one for each pair of ranks at a time.
  void transfer(const char* what, const std::vector<Message>& messages);

 private:
  struct State;
  struct Area {
    int file = -1;
    char* data = nullptr;
    size_t size = 0;
  };

  char* own_area(Area& area, std::atomic<int>& published, size_t bytes);
  const char* area_of(Area& area, int owner, int file, size_t bytes);
  char* channel_area(int sender, int receiver, size_t bytes);
  void wait(const char* what, const std::function<bool()>& is_done, const std::function<std::vector<int>()>& missing);
  void meet(const char* what);
  void check_places() const;
  void check_arguments(const char* what, int parity);
  void wake();
  bool try_send(const Message& message);
  bool try_receive(const Message& message);

  const int die_;
  const size_t buffer_bytes_;
  bool has_buffers_ = false;
  std::mutex buffers_mutex_;
  std::mutex one_at_a_time_;  // streams may have threads of their own
  int file_ = -1;  // with the state, and what ranks send each other
  State* state_ = nullptr;
  uint64_t step_ = 0;       // meetings
  uint64_t exchanges_ = 0;
  std::map<std::pair<int, int>, Area> areas_;     // by owner and parity of the exchange
  std::map<std::pair<int, int>, Area> channels_;  // by sender and receiver
};

// The group of this process with that name, for kernels with a collective inside. Throws c10::Error if there is none, or
// its buffers do not fit into what is left of the die.
SharedGroup& group_named(const std::string& name);

}  // namespace cann
