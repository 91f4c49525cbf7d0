#include "graph.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <limits>
#include <mutex>
#include <thread>

#include "device.h"
#include "generator.h"
#include "host_alias.h"
#include "memory.h"
#include "memory_pool.h"
#include "meters.h"
#include "pinned_memory.h"
#include "recorder.h"

namespace npu {

// The capture under way.
struct Capture {
  struct Kept {
    c10::intrusive_ptr<c10::StorageImpl> storage;
    std::string bytes;
  };

  Graph* graph;
  std::thread::id thread;
  std::string fault;
  std::vector<Kept> kept;
  std::unordered_set<const c10::StorageImpl*> seen_written;
  std::unordered_set<const void*> made;  // addresses that were allocated during the capture
  std::unordered_map<const c10::StorageImpl*, const void*> seen_foreign;
  std::vector<at::Tensor> spoilt;
  std::unordered_map<c10::DeviceIndex, at::Tensor> generator_states;

  PrivatePool* graph_pool() const { return graph->pool_->get(); }
  void keep(const c10::intrusive_ptr<c10::StorageImpl>& storage);
  void undo();
};

namespace {

thread_local bool bystander = false;

std::mutex& mutex() {
  static std::mutex one;
  return one;
}

std::unique_ptr<Capture>& current_capture() {
  static auto* one = new std::unique_ptr<Capture>();
  return *one;
}

// Tensors that live longer than the mode in which they are made.
at::Tensor host_tensor_over(c10::Storage storage, const at::Tensor& like) {
  const c10::InferenceMode ordinary_tensors(false);
  auto tensor = tensor_over(std::move(storage), c10::DispatchKey::CPU, like);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

c10::Storage host_storage_over(const c10::StorageImpl& storage) {
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)), nullptr, false);
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.has_storage(), "only dense tensors are emulated on the NPU");
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

}  // namespace

void Capture::keep(const c10::intrusive_ptr<c10::StorageImpl>& storage) {
  if (!storage->nbytes() || !storage->data() || !seen_written.insert(storage.get()).second) return;
  kept.push_back({storage, std::string(static_cast<const char*>(storage->data()), storage->nbytes())});
}

void Capture::undo() {
  const graph::KernelScope scope;
  for (const auto& each : spoilt) {
    if (each.is_floating_point() || each.is_complex()) {
      each.fill_(std::numeric_limits<double>::quiet_NaN());
    } else {
      each.zero_();
    }
  }
  for (const auto& [storage, bytes] : kept)
    if (storage->nbytes() == bytes.size()) std::memcpy(storage->mutable_data(), bytes.data(), bytes.size());
  for (const auto& [device, state] : generator_states)
    host_generator(default_generator(device)).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
}

namespace graph {

std::atomic<bool> capturing{false};

// Backward passes run in threads of their own, and belong to the capture.
bool recorded_here() noexcept {
  const auto* capture = current_capture().get();
  if (!capture || bystander) return false;
  return capture->thread == std::this_thread::get_id() || torch::autograd::get_current_graph_task_id() != -1;
}

void refuse(const std::string& what) {
  if (!recording()) return;
  std::lock_guard<std::mutex> lock(mutex());
  if (current_capture()->fault.empty()) current_capture()->fault = what;
  TORCH_CHECK(false, "operation not permitted while an NPU graph is captured: ", what);
}

void set_bystander(bool value) noexcept { bystander = value; }

PrivatePool* pool() noexcept { return recording() ? current_capture()->graph_pool() : nullptr; }

void note_allocation(const void* data) {
  std::lock_guard<std::mutex> lock(mutex());
  current_capture()->made.insert(data);
}

void use_generator(const at::Generator& generator, c10::DeviceIndex device) {
  const auto& own = host_generator(default_generator(device));
  if (generator.unsafeGetGeneratorImpl() != own.unsafeGetGeneratorImpl())
    refuse("random numbers from a generator that is not the die's own, so the graph cannot advance it");
  std::lock_guard<std::mutex> lock(mutex());
  auto& states = current_capture()->generator_states;
  if (!states.count(device)) states.emplace(device, at::Tensor(own.unsafeGetGeneratorImpl()->get_state()));
}

void write_results(const std::vector<at::Tensor>& into, const std::vector<at::Tensor>& results,
                   const std::string& name) {
  const KernelScope scope;
  TORCH_CHECK(into.size() == results.size(), name, " made ", into.size(), " tensors when it was captured, and now ",
              results.size());
  for (size_t index = 0; index < into.size(); ++index) {
    if (!into[index].defined()) continue;
    TORCH_CHECK(into[index].sizes() == results[index].sizes(), name, " made a tensor of shape ", into[index].sizes(),
                " when it was captured, and now one of shape ", results[index].sizes());
    into[index].copy_(results[index]);
  }
}

}  // namespace graph

GraphCall::GraphCall(std::string name) : name_(std::move(name)) {}

void GraphCall::writes(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return;
  auto* storage = storage_of(tensor);
  std::lock_guard<std::mutex> lock(mutex());
  auto& capture = *current_capture();
  if (capture.made.count(storage->data())) {
    capture.spoilt.push_back(host_tensor_over(host_storage_over(*storage), tensor));
  } else {
    capture.keep(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  }
}

void GraphCall::depend_on(const c10::StorageImpl* storage) {
  auto& capture = *current_capture();
  auto* pool = private_pool_of(storage->data_ptr());
  if (!storage->data() || pool == capture.graph_pool()) return;
  if (pool) return capture.graph->use_other_pool(pool);
  if (!capture.seen_foreign.emplace(storage, storage->data()).second) return;
  auto kept = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(const_cast<c10::StorageImpl*>(storage));
  capture.graph->foreign_.push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(kept), storage->data(), name_});
}

at::Tensor GraphCall::operand(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  for (const auto& [device, host] : operands_)
    if (device.is_same(tensor)) return host;
  at::Tensor host;
  if (!tensor.is_privateuseone()) {
    const c10::InferenceMode ordinary_tensors(false);
    host = tensor.detach().clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
  } else {
    const auto* storage = storage_of(tensor);
    auto known = storages_.begin();
    while (known != storages_.end() && known->first != storage) ++known;
    if (known == storages_.end()) {
      std::lock_guard<std::mutex> lock(mutex());
      depend_on(storage);
      known = storages_.emplace(storages_.end(), storage, host_storage_over(*storage));
    }
    host = host_tensor_over(known->second, tensor);
  }
  operands_.emplace_back(tensor, host);
  return host;
}

c10::IValue GraphCall::operand(const c10::IValue& value) {
  if (value.isTensor()) return operand(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorList()) list.push_back(operand(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> each : value.toOptionalTensorList())
      list.push_back(each ? std::optional<at::Tensor>(operand(*each)) : std::nullopt);
    return list;
  }
  return value;
}

at::Tensor GraphCall::result(const at::Tensor& tensor) {
  auto host = operand(tensor);
  std::lock_guard<std::mutex> lock(mutex());
  if (host.defined() && current_capture()->made.count(storage_of(tensor)->data())) current_capture()->spoilt.push_back(host);
  return host;
}

at::Tensor GraphCall::pinned(const at::Tensor& tensor) {
  if (!is_pinned(tensor.storage().data())) graph::refuse(name_ + " with memory of the host that is not pinned");
  std::lock_guard<std::mutex> lock(mutex());
  depend_on(storage_of(tensor));
  return host_tensor_over(host_storage_over(*storage_of(tensor)), tensor);
}

void GraphCall::done(std::function<void()> replay) {
  std::lock_guard<std::mutex> lock(mutex());
  current_capture()->graph->tasks_.push_back({name_, std::move(replay)});
}

Graph::Graph() = default;

Graph::~Graph() {
  if (current_capture() && current_capture()->graph == this) {
    graph::capturing = false;
    current_capture().reset();
  }
}

void Graph::begin_capture(std::optional<PrivatePool::Name> pool) {
  TORCH_CHECK(!graph::capturing, "an NPU graph is being captured already: captures cannot be nested");
  TORCH_CHECK(!captured_, "This NPUGraph instance already owns a captured graph. To capture a new graph, create a ",
              "new instance or reset this one.");
  initialize();
  reset();
  pool_ = std::make_unique<PoolUse>(PrivatePool::named(pool ? *pool : PrivatePool::new_name(false)));
  std::lock_guard<std::mutex> lock(mutex());
  current_capture() = std::make_unique<Capture>();
  current_capture()->graph = this;
  current_capture()->thread = std::this_thread::get_id();
  graph::capturing = true;
}

void Graph::end_capture() {
  TORCH_CHECK(current_capture() && current_capture()->graph == this, "this NPUGraph is not being captured");
  graph::capturing = false;
  std::unique_ptr<Capture> capture;
  {
    std::lock_guard<std::mutex> lock(mutex());
    capture = std::move(current_capture());
  }
  capture->undo();
  if (!capture->fault.empty()) {
    reset();
    TORCH_CHECK(false, "the capture of this NPU graph is invalid because of an operation that was not permitted: ",
                capture->fault);
  }
  captured_ = true;
  meters::count_graph_capture();
}

void Graph::use_other_pool(PrivatePool* pool) {
  for (const auto& known : other_pools_)
    if (known->get() == pool) return;
  other_pools_.push_back(std::make_shared<PoolUse>(pool->shared_from_this()));
}

void Graph::check_foreign_memory() const {
  for (const auto& each : foreign_) {
    const auto storage = each.storage.lock();
    TORCH_CHECK(storage && storage->data() == each.address, "this NPU graph uses memory that was freed or replaced ",
                "since it was captured, first in ", each.user);
    pool::refuse_absent(each.address);
  }
}

void Graph::replay() {
  TORCH_CHECK(captured_, "Called NPUGraph::replay without a preceding successful capture.");
  graph::refuse("replay of another graph");
  refuse_after_fork();
  check_foreign_memory();
  const ChargeScope uncharged(-1);
  for (const auto& task : tasks_) task.run();
  meters::count_graph_replay(size());
}

void Graph::reset() {
  tasks_.clear();
  foreign_.clear();
  pool_.reset();
  other_pools_.clear();
  captured_ = false;
}

PrivatePool::Name Graph::pool() const {
  TORCH_CHECK(captured_, "Called NPUGraph::pool without a preceding successful capture.");
  return (**pool_).name();
}

}  // namespace npu
