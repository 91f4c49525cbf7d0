// Captured graphs: while one is captured, what goes to the die is recorded; a replay does it again in the same memory.
//
// A capture computes nothing that anybody may see. The kernels do run, because that is how shapes come about, but what
// they wrote to older memory is undone at the end, and what they made is spoilt.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "private_pool.h"

namespace npu {

class Graph final {
 public:
  Graph();
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Records what this thread, and backward passes, hand to the die from now on. Throws if a capture is under way or
  // this graph has been captured.
  void begin_capture(std::optional<PrivatePool::Name> pool);
  // Throws if something has made the capture invalid; the graph is then as if it had never been captured.
  void end_capture();
  // Does the recorded work. Throws if there is none, or if memory that it uses is gone.
  void replay();
  // Forgets the work and gives the memory up.
  void reset();
  PrivatePool::Name pool() const;
  // Operators, copies and collectives of the graph.
  int64_t size() const { return static_cast<int64_t>(tasks_.size()); }

 private:
  friend class GraphCall;
  friend struct Capture;

  struct Task {
    std::string name;
    std::function<void()> run;
  };
  // Memory that the graph uses and does not keep.
  struct Foreign {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* address;
    std::string user;
  };

  void check_foreign_memory() const;
  void use_other_pool(PrivatePool* pool);

  std::vector<Task> tasks_;
  std::vector<Foreign> foreign_;
  std::unique_ptr<PoolUse> pool_;
  std::vector<std::shared_ptr<PoolUse>> other_pools_;  // memory of other graphs that this one uses
  bool captured_ = false;
};

// One call while it is recorded: what it takes and makes, as host tensors that stay valid for every replay.
class GraphCall {
 public:
  explicit GraphCall(std::string name);

  // Notes that the call is going to write to a tensor.
  void writes(const at::Tensor& tensor);
  // A host tensor over the memory of an NPU tensor, without owning it. Tensors of the host are copied: a graph holds
  // their values.
  at::Tensor operand(const at::Tensor& tensor);
  // The same with the tensors, also in lists, of a value.
  c10::IValue operand(const c10::IValue& value);
  // A host tensor over the memory of a tensor that the call has made, which is spoilt when the capture ends.
  at::Tensor result(const at::Tensor& tensor);
  // The memory of the host that a copy reads or writes; it has to be pinned.
  at::Tensor pinned(const at::Tensor& tensor);
  void done(std::function<void()> replay);

 private:
  void depend_on(const c10::StorageImpl* storage);

  std::string name_;
  std::vector<std::pair<at::Tensor, at::Tensor>> operands_;
  std::vector<std::pair<const c10::StorageImpl*, c10::Storage>> storages_;
};

namespace graph {

// Kernels of a replay run below autograd and below whatever watches the dispatcher.
struct KernelScope {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_modes{c10::python_ks};
};

extern std::atomic<bool> capturing;

bool recorded_here() noexcept;
// Whether what this thread does is recorded.
inline bool recording() noexcept { return capturing.load(std::memory_order_relaxed) && recorded_here(); }
// Throws if it is, and makes the capture invalid: `what` cannot be part of a graph.
void refuse(const std::string& what);
// What this thread does is not recorded although it captures: it works on a stream that has no part in the capture.
void set_bystander(bool bystander) noexcept;
// The pool of the capture that records this thread, or null.
PrivatePool* pool() noexcept;
void note_allocation(const void* data);
// Keeps the state of the die's own generator for the end of the capture, and refuses other generators.
void use_generator(const at::Generator& host_generator, c10::DeviceIndex device);

// Puts the results of a replay where those of the capture are.
void write_results(const std::vector<at::Tensor>& into, const std::vector<at::Tensor>& results,
                   const std::string& name);

}  // namespace graph
}  // namespace npu
