#include "stream_thread.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <vector>

#include "device.h"
#include "runtime.h"

namespace cann {
namespace {

constexpr std::chrono::milliseconds kHeld{50};   // the longest that work is held back
constexpr std::chrono::seconds kLeaving{1};      // the longest that the end of a process waits for a stream
constexpr int kUnheld = 64;  // pieces of work that are not held back after one that was in vain

std::mutex threads_mutex;

std::vector<std::weak_ptr<StreamThread>>& threads() {
  static auto* all = new std::vector<std::weak_ptr<StreamThread>>();
  return *all;
}

bool has_seed() {
  const char* text = std::getenv("NPU_EMULATOR_STREAM_SEED");
  return text && *text;
}
std::atomic<bool> has_threads{has_seed()};

std::shared_ptr<StreamThread> listed(std::shared_ptr<StreamThread> thread) {
  threads().push_back(thread);
  return thread;
}

std::vector<std::shared_ptr<StreamThread>> living_threads() {
  std::lock_guard<std::mutex> guard(threads_mutex);
  std::vector<std::shared_ptr<StreamThread>> living;
  for (const auto& one : threads())
    if (auto thread = one.lock()) living.push_back(std::move(thread));
  return living;
}

}  // namespace

StreamThread::StreamThread(std::optional<uint64_t> seed)
    : draws_(seed ? std::make_optional<std::mt19937_64>(*seed) : std::nullopt), thread_([this] { work(); }) {}

StreamThread::~StreamThread() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

uint64_t StreamThread::give(Work run) {
  std::lock_guard<std::mutex> guard(mutex_);
  pending_.push_back(std::move(run));
  changed_.notify_all();
  return ++given_;
}

uint64_t StreamThread::given() {
  std::lock_guard<std::mutex> guard(mutex_);
  return given_;
}

bool StreamThread::has_done(uint64_t number) {
  std::lock_guard<std::mutex> guard(mutex_);
  return done_ >= number;
}

Failure StreamThread::wait(uint64_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  wanted_ = std::max(wanted_, number);
  unheld_ = 0;
  changed_.notify_all();
  changed_.wait(lock, [&] { return done_ >= number || is_stopped_; });
  return failure_.is_fatal ? failure_ : Failure();
}

std::string StreamThread::failure() {
  std::lock_guard<std::mutex> guard(mutex_);
  auto words = failure_.words;
  if (!failure_.is_fatal) failure_ = {};
  return words;
}

void StreamThread::stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  is_stopped_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, kLeaving, [&] { return has_ended_; });
}

void StreamThread::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !pending_.empty() || ends_ || is_stopped_; });
    if (is_stopped_ || pending_.empty()) break;
    if (unheld_ > 0) --unheld_;
    else if (draws_ && (*draws_)() % 4) hold(lock);
    if (is_stopped_) break;
    auto run = std::move(pending_.front());
    pending_.pop_front();
    if (!failure_.is_fatal) {
      lock.unlock();
      auto wrong = run();
      run = nullptr;
      lock.lock();
      if (failure_.words.empty() || wrong.is_fatal) failure_ = std::move(wrong);
    }
    ++done_;
    changed_.notify_all();
  }
  has_ended_ = true;
  changed_.notify_all();
}

// Until something waits for the next piece of work.
void StreamThread::hold(std::unique_lock<std::mutex>& lock) {
  if (!changed_.wait_for(lock, kHeld, [&] { return wanted_ > done_ || ends_ || is_stopped_; })) unheld_ = kUnheld;
}

bool has_stream_threads() { return has_threads.load(std::memory_order_acquire); }

std::shared_ptr<StreamThread> new_stream_thread() {
  if (!has_seed()) return nullptr;
  static const auto seed = static_cast<uint64_t>(npu::environment_integer("NPU_EMULATOR_STREAM_SEED", 0));
  constexpr uint64_t kMostStreams = 1000;
  std::lock_guard<std::mutex> guard(threads_mutex);
  return listed(std::make_shared<StreamThread>(seed * kMostStreams + threads().size()));
}

std::shared_ptr<StreamThread> needed_stream_thread() {
  std::lock_guard<std::mutex> guard(threads_mutex);
  has_threads = true;
  return listed(std::make_shared<StreamThread>(std::nullopt));
}

std::string wait_for_stream_threads() {
  std::string wrong;
  for (const auto& thread : living_threads()) {
    thread->wait(thread->given());
    if (wrong.empty()) wrong = thread->failure();
  }
  return wrong;
}

void stop_stream_threads() {
  // Kept for ever: one that hangs in a collective still uses what is its own.
  static auto* const kept = new std::vector<std::shared_ptr<StreamThread>>();
  *kept = living_threads();
  for (const auto& thread : *kept) thread->stop();
}

}  // namespace cann
