#include "private_pool.h"

#include <vector>

#include "memory.h"

namespace npu {
namespace {

struct Names {
  std::mutex mutex;
  std::map<PrivatePool::Name, std::weak_ptr<PrivatePool>> pools;
  uint64_t next = 1;
};

Names& names() {
  static auto* one = new Names();
  return *one;
}

}  // namespace

PrivatePool::Name PrivatePool::new_name(bool asked_for) {
  std::lock_guard<std::mutex> lock(names().mutex);
  const auto number = names().next++;
  return asked_for ? Name{0, number} : Name{number, 0};
}

std::shared_ptr<PrivatePool> PrivatePool::named(Name name) {
  std::lock_guard<std::mutex> lock(names().mutex);
  auto& known = names().pools[name];
  auto pool = known.lock();
  if (!pool) known = pool = std::make_shared<PrivatePool>(name);
  return pool;
}

void* PrivatePool::allocate(c10::DeviceIndex device, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  void* data = nullptr;
  const auto wanted = (static_cast<int64_t>(bytes) + kGranule - 1) / kGranule * kGranule;
  const auto found = unused_.lower_bound({device, wanted});
  if (found != unused_.end() && found->first.first == device && found->first.second <= 2 * wanted) {
    data = found->second;
    take_from_reserve(device, found->first.second);
    unused_.erase(found);
  } else {
    data = new_block(device, wanted, this);
  }
  if (blocks_of_tensors_++ == 0) self_ = shared_from_this();
  return data;
}

void PrivatePool::release(void* data) noexcept {
  std::shared_ptr<PrivatePool> last;  // destroyed after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  if (users_) {
    const auto [device, bytes] = block_size(data);
    put_into_reserve(device, bytes);
    unused_.emplace(std::make_pair(device, bytes), data);
  } else {
    delete_block(data);
  }
  if (--blocks_of_tensors_ == 0) last = std::move(self_);
}

void PrivatePool::begin_use() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++users_;
}

void PrivatePool::end_use() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--users_) return;
  for (const auto& [size, data] : unused_) {
    take_from_reserve(size.first, size.second);
    delete_block(data);
  }
  unused_.clear();
}

}  // namespace npu
