// A stream that works in a thread of its own, beside the host and other streams, and later than it might.
//
// With a seed it is drawn for each piece of work whether the stream goes on at once, or holds it and all that comes after it
// back: until something waits for it, and no longer than a little while, so that nothing is held for ever that a device
// would do. Streams then run in any order that events allow, and what nobody waits for is not there yet. Without one it
// goes on at once: for a stream that waits for what the host has not asked for yet.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>

namespace cann {

// The error of a piece of work; empty words mean that it succeeded.
struct Failure {
  std::string words;
  bool is_fatal = false;  // nothing that comes after it is done
};

class StreamThread {
 public:
  explicit StreamThread(std::optional<uint64_t> seed);
  // Does what is left.
  ~StreamThread();
  StreamThread(const StreamThread&) = delete;
  StreamThread& operator=(const StreamThread&) = delete;

  // Gives work, to be done after what was given before; returns its number, from 1 on. `run` must not throw.
  using Work = std::function<Failure()>;
  uint64_t give(Work run);
  // The number of what was given last.
  uint64_t given();
  bool has_done(uint64_t number);
  // Has everything up to a number done, and waits for it. Says what was fatal: it is so for who waits, too.
  Failure wait(uint64_t number);
  // Says what went wrong first: once, or always if it is fatal. Empty if nothing did.
  std::string failure();
  // Nothing more is begun; waits a moment for what is under way. For the end of a process.
  void stop();

 private:
  void work();
  void hold(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> pending_;
  uint64_t given_ = 0, done_ = 0, wanted_ = 0;
  Failure failure_;
  bool ends_ = false, is_stopped_ = false, has_ended_ = false;
  int unheld_ = 0;  // pieces of work that are not held back, since one was held in vain and nobody has waited since
  std::optional<std::mt19937_64> draws_;
  std::thread thread_;
};

// A new thread for a stream with NPU_EMULATOR_STREAM_SEED, or null where that is not set: work is done when it is given.
std::shared_ptr<StreamThread> new_stream_thread();
// One for a stream that needs it, whatever is set.
std::shared_ptr<StreamThread> needed_stream_thread();
// Waits for all that the streams of this process were given; returns what went wrong first.
std::string wait_for_stream_threads();
void stop_stream_threads();

}  // namespace cann
