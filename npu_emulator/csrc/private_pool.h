// Memory that captured graphs keep to themselves: what tensors leave is used again inside the pool only.
#pragma once
#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace npu {

class PrivatePool final : public std::enable_shared_from_this<PrivatePool> {
 public:
  // As torch names them: (0, n) was asked for, (n, 0) belongs to one graph.
  using Name = std::pair<uint64_t, uint64_t>;

  static Name new_name(bool asked_for);
  // The pool of this name; a new one when nobody uses it.
  static std::shared_ptr<PrivatePool> named(Name name);

  explicit PrivatePool(Name name) : name_(name) {}
  PrivatePool(const PrivatePool&) = delete;
  PrivatePool& operator=(const PrivatePool&) = delete;

  Name name() const { return name_; }
  // The smallest unused block that fits without wasting half of it, or a new one, which is charged to the die.
  void* allocate(c10::DeviceIndex device, size_t bytes);
  // Takes a block back whose tensor is gone.
  void release(void* data) noexcept;
  // Blocks without a tensor stay with the pool while somebody uses it.
  void begin_use();
  void end_use() noexcept;

 private:
  const Name name_;
  std::mutex mutex_;
  std::multimap<std::pair<c10::DeviceIndex, int64_t>, void*> unused_;
  int64_t users_ = 0;
  int64_t blocks_of_tensors_ = 0;
  std::shared_ptr<PrivatePool> self_;  // while tensors have blocks
};

// One use of a pool.
class PoolUse {
 public:
  explicit PoolUse(std::shared_ptr<PrivatePool> pool) : pool_(std::move(pool)) { pool_->begin_use(); }
  ~PoolUse() { pool_->end_use(); }
  PoolUse(const PoolUse&) = delete;
  PoolUse& operator=(const PoolUse&) = delete;
  PrivatePool& operator*() const { return *pool_; }
  PrivatePool* get() const { return pool_.get(); }

 private:
  std::shared_ptr<PrivatePool> pool_;
};

}  // namespace npu
