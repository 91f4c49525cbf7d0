#include "hccl.h"

#include <ATen/NativeFunctions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <numeric>
#include <thread>

#include "device.h"
#include "graph.h"
#include "host_alias.h"
#include "memory.h"
#include "meters.h"

namespace npu {
namespace {

using at::Tensor;
using c10d::ReduceOp;

std::atomic<bool> deferred{false};

struct DeferredWorks {
  std::mutex mutex;
  std::vector<c10::intrusive_ptr<c10d::Work>> pending;
};

DeferredWorks& deferred_works() {
  static auto* works = new DeferredWorks();
  return *works;
}

// A collective that has completed need not be waited for again; what it holds is given up with it.
void forget_deferred(const c10d::Work* completed) {
  auto& works = deferred_works();
  std::lock_guard<std::mutex> lock(works.mutex);
  const auto is_completed = [&](const auto& work) { return work.get() == completed; };
  works.pending.erase(std::remove_if(works.pending.begin(), works.pending.end(), is_completed), works.pending.end());
}

// gloo's threads refuse inference tensors, and nothing here is recorded for backward.
struct CollectiveScope {
  c10::InferenceMode ordinary_tensors{false};
  at::NoGradGuard no_grad;
};

Tensor as_bytes(const Tensor& contiguous_host) { return contiguous_host.view({-1}).view(at::kByte); }

// A tensor of a rank as gloo can take it: contiguous, on the host, as bytes.
Tensor host_bytes(const Tensor& tensor) { return as_bytes(host_alias(tensor).contiguous()); }

// The same for a result, with the way back: deferred or strided results are written when somebody waits for them.
struct ResultBuffer {
  explicit ResultBuffer(const Tensor& tensor)
      : original(host_alias(tensor)),
        contiguous(deferred ? original.clone(at::MemoryFormat::Contiguous) : original.contiguous()),
        bytes(as_bytes(contiguous)) {}

  bool in_place() const { return contiguous.is_same(original); }
  std::function<void()> write_back() const {
    return [original = original, contiguous = contiguous] { original.copy_(contiguous); };
  }

  Tensor original, contiguous, bytes;
};

int64_t bytes_of(const Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

int64_t bytes_of(const std::vector<Tensor>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0},
                         [](int64_t sum, const Tensor& each) { return sum + bytes_of(each); });
}

// HCCL takes one tensor where torch has a list: torch_npu copies the list to, or from, one that it allocates.
std::unique_ptr<Workspace> flat_buffer(const std::vector<Tensor>& list) {
  if (list.empty() || !list[0].is_privateuseone()) return nullptr;
  return std::make_unique<Workspace>(list[0].device().index(), bytes_of(list));
}

// The type in which a reduction is computed; gloo has no kernel for the others.
at::ScalarType reduction_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBool:
      return at::kByte;
    case at::kShort:
      return at::kInt;
    default:
      return tensor.scalar_type();
  }
}

// On truth values, sums and maxima mean "any"; products and minima mean "all".
ReduceOp reduction_on(const Tensor& tensor, const ReduceOp& op) {
  if (op == ReduceOp::AVG) return ReduceOp::SUM;
  if (tensor.scalar_type() != at::kBool) return op;
  if (op == ReduceOp::SUM) return ReduceOp::MAX;
  return op == ReduceOp::PRODUCT ? ReduceOp(ReduceOp::MIN) : op;
}

void divide_by_ranks(Tensor& sum, int size) {
  if (sum.is_floating_point() || sum.is_complex()) {
    sum.div_(size);
  } else {
    sum.floor_divide_(size);
  }
}

void accumulate(Tensor& into, const Tensor& part, const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM:
      into.add_(part);
      break;
    case ReduceOp::PRODUCT:
      into.mul_(part);
      break;
    case ReduceOp::MIN:
      at::minimum_out(into, into, part);
      break;
    case ReduceOp::MAX:
      at::maximum_out(into, into, part);
      break;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "hccl: this reduction is not emulated");
  }
}

void check_reduction(const ReduceOp& op) {
  TORCH_CHECK_NOT_IMPLEMENTED(op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PRODUCT ||
                                  op == ReduceOp::MIN || op == ReduceOp::MAX,
                              "hccl: only SUM, AVG, PRODUCT, MIN and MAX are emulated");
}

}  // namespace

HcclWork::HcclWork(std::vector<Carrier> carriers, std::function<void()> finish, std::vector<Tensor> outputs,
                   std::function<std::string()> explain)
    : c10d::Work(-1, c10d::OpType::UNKNOWN),
      carriers_(std::move(carriers)),
      finish_(std::move(finish)),
      outputs_(std::move(outputs)),
      explain_(std::move(explain)) {}

bool HcclWork::isCompleted() {
  if (done_) return true;
  for (const auto& carrier : carriers_)
    if (!carrier->isCompleted()) return false;
  return wait();
}

bool HcclWork::wait(std::chrono::milliseconds timeout) {
  if (done_) return true;
  const CollectiveScope scope;
  try {
    for (const auto& carrier : carriers_) carrier->wait(timeout);
  } catch (const std::exception& error) {
    TORCH_CHECK_WITH(DistBackendError, false, explain_ ? explain_() : "hccl failed", ": ", error.what());
  }
  if (finish_) finish_();
  done_ = true;
  finish_ = nullptr;
  if (deferred) forget_deferred(this);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> HcclWork::getFuture() {
  if (future_) return future_;
  wait();
  std::vector<c10::Device> devices;
  if (!outputs_.empty() && outputs_[0].is_privateuseone()) devices.push_back(outputs_[0].device());
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  future_->markCompleted(c10::IValue(outputs_));
  return future_;
}

int HcclWork::sourceRank() const {
  TORCH_CHECK(!carriers_.empty(), "only a receive has a source rank");
  return carriers_[0]->sourceRank();
}

namespace {

// Which ranks of a group did not come to the same collective. Ranks that wait for them run out of time one after
// another, so each signs in and gives the others a moment.
std::string missing_ranks(c10d::Store& store, const std::string& collective, int rank, int size) {
  constexpr auto kPatience = std::chrono::seconds(2);
  const auto key = [&](int of) { return "hccl_failed/" + collective + "/" + std::to_string(of); };
  store.set(key(rank), std::vector<uint8_t>{1});
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  std::vector<int> missing(size);
  std::iota(missing.begin(), missing.end(), 0);
  while (true) {
    const auto signed_in = [&](int of) { return of == rank || store.check({key(of)}); };
    missing.erase(std::remove_if(missing.begin(), missing.end(), signed_in), missing.end());
    if (missing.empty() || std::chrono::steady_clock::now() > deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  std::string names;
  for (const auto of : missing) names += (names.empty() ? "" : ", ") + std::to_string(of);
  return names;
}

}  // namespace

HcclBackend::HcclBackend(c10::intrusive_ptr<c10d::Backend> carrier, c10::intrusive_ptr<c10d::Store> store, int rank,
                         int size)
    : c10d::Backend(rank, size), carrier_(std::move(carrier)), store_(std::move(store)) {
  init();
}

HcclBackend::WorkPointer HcclBackend::record(const char* kind, const Tensors& outputs, const Tensors& inputs,
                                            std::function<WorkPointer(Tensors&, Tensors&)> launch) {
  GraphCall call(c10::str("hccl::", kind));
  Tensors recorded_outputs, recorded_inputs;
  for (const auto& each : outputs) recorded_outputs.push_back(call.result(each));
  for (const auto& each : inputs) recorded_inputs.push_back(call.operand(each));
  call.done([backend = c10::intrusive_ptr<HcclBackend>::reclaim_copy(this), launch = std::move(launch),
             recorded_outputs, recorded_inputs]() mutable { launch(recorded_outputs, recorded_inputs)->wait(); });
  return c10::make_intrusive<HcclWork>(std::vector<WorkPointer>{}, nullptr, outputs, nullptr);
}

HcclBackend::Launched HcclBackend::begin(const char* kind, int64_t bytes, bool collective) {
  graph::refuse(c10::str("hccl ", kind, ", which is not emulated in a graph"));
  meters::count_collective(kind, size_, bytes);
  Launched launched;
  launched.computing = std::make_unique<recorder::Computing>(std::string("hccl::") + kind, current_device(),
                                                             recorder::Kind::kCollective);
  if (!collective) {
    launched.explain = [kind, rank = rank_] { return c10::str("hccl: ", kind, " of rank ", rank); };
    return launched;
  }
  launched.explain = [kind, number = collectives_++, store = store_, rank = rank_, size = size_] {
    const auto text = c10::str("hccl: ", kind, " (collective ", number, " of its group) failed on rank ", rank);
    try {
      const auto missing = missing_ranks(*store, std::to_string(number), rank, size);
      if (missing.empty()) return text;
      return c10::str(text, "; of ", size, " ranks, these did not take part: ", missing);
    } catch (const std::exception&) {
      return text + "; the group's store does not answer, its rank 0 may be gone";
    }
  };
  return launched;
}

HcclBackend::WorkPointer HcclBackend::point_to_point(Launched launched, Tensors outputs) {
  std::function<void()> finish;
  if (!launched.finish.empty()) {
    finish = [steps = std::move(launched.finish)] {
      for (const auto& step : steps) step();
    };
  }
  auto work = c10::make_intrusive<HcclWork>(std::move(launched.carriers), std::move(finish), std::move(outputs),
                                           std::move(launched.explain));
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

HcclBackend::WorkPointer HcclBackend::complete(Launched launched, Tensors outputs) {
  const auto computing = std::move(launched.computing);
  auto work = point_to_point(std::move(launched), std::move(outputs));
  if (!deferred) {
    work->wait();
    return work;
  }
  std::lock_guard<std::mutex> lock(deferred_works().mutex);
  deferred_works().pending.push_back(work);
  return work;
}

void HcclBackend::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
}

HcclBackend::WorkPointer HcclBackend::endCoalescing() {
  coalescing_ = false;
  return c10::make_intrusive<HcclWork>(std::exchange(coalesced_, {}), nullptr, Tensors{}, nullptr);
}

HcclBackend::WorkPointer HcclBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (graph::recording())
    return record("broadcast", tensors, {},
                  [=](Tensors& outputs, Tensors&) { return broadcast(outputs, options); });
  const CollectiveScope scope;
  auto launched = begin("broadcast", bytes_of(tensors));
  for (const auto& tensor : tensors) {
    const ResultBuffer buffer(tensor);
    if (size_ == 1 || !buffer.bytes.numel()) continue;
    Tensors carried{buffer.bytes};
    launched.carriers.push_back(carrier_->broadcast(carried, options));
    if (!buffer.in_place()) launched.finish.push_back(buffer.write_back());
  }
  return complete(std::move(launched), tensors);
}

void HcclBackend::launch_all_reduce(Launched& launched, const Tensor& tensor, const ReduceOp& op) {
  check_reduction(op);
  const auto host = host_alias(tensor);
  if (size_ == 1 || !host.numel()) return;
  auto reduced = host.scalar_type() == at::kBool ? host.contiguous().view(at::kByte)
                                                 : host.contiguous().to(reduction_type(host));
  if (deferred && reduced.is_alias_of(host)) reduced = reduced.clone();
  const bool in_place = reduced.is_alias_of(host) && host.is_contiguous();
  c10d::AllreduceOptions options;
  options.reduceOp = reduction_on(host, op);
  Tensors carried{reduced.is_complex() ? at::view_as_real(reduced) : reduced};
  launched.carriers.push_back(carrier_->allreduce(carried, options));
  const bool average = op == ReduceOp::AVG;
  if (in_place && !average) return;
  launched.finish.push_back([=, size = size_]() mutable {
    if (average) divide_by_ranks(reduced, size);
    if (!in_place) host.copy_(reduced);
  });
}

HcclBackend::WorkPointer HcclBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (graph::recording())
    return record("all_reduce", tensors, {},
                  [=](Tensors& outputs, Tensors&) { return allreduce(outputs, options); });
  const CollectiveScope scope;
  auto launched = begin("all_reduce", bytes_of(tensors));
  for (const auto& tensor : tensors) launch_all_reduce(launched, tensor, options.reduceOp);
  return complete(std::move(launched), tensors);
}

HcclBackend::WorkPointer HcclBackend::allreduce_coalesced(Tensors& tensors,
                                                          const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

HcclBackend::WorkPointer HcclBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (graph::recording())
    return record("reduce", tensors, {}, [=](Tensors& outputs, Tensors&) { return reduce(outputs, options); });
  const CollectiveScope scope;
  auto launched = begin("reduce", bytes_of(tensors));
  for (const auto& tensor : tensors) {
    const auto host = host_alias(tensor);
    const auto reduced = host.clone(at::MemoryFormat::Contiguous);
    launch_all_reduce(launched, reduced, options.reduceOp);
    if (rank_ == options.rootRank) launched.finish.push_back([=] { host.copy_(reduced); });
  }
  return complete(std::move(launched), tensors);
}

void HcclBackend::launch_all_gather(Launched& launched, const Tensors& outputs, const Tensor& input) {
  const auto own = host_bytes(input);
  bool even = true;
  for (const auto& output : outputs) even = even && bytes_of(output) == own.numel();
  std::vector<Tensors> gathered(1);
  for (const auto& output : outputs) {
    const ResultBuffer buffer(output);
    gathered[0].push_back(buffer.bytes);
    if (!buffer.in_place()) launched.finish.push_back(buffer.write_back());
  }
  if (size_ == 1 || !even) {
    TORCH_CHECK(gathered[0][rank_].numel() == own.numel(), "all_gather: the output for this rank has ",
                gathered[0][rank_].numel(), " bytes, its input ", own.numel());
    gathered[0][rank_].copy_(own);
  }
  if (size_ == 1 || (even && !own.numel())) return;
  if (even) {
    Tensors inputs{own};
    launched.carriers.push_back(carrier_->allgather(gathered, inputs, {}));
    return;
  }
  for (int rank = 0; rank < size_; ++rank) {
    if (!gathered[0][rank].numel()) continue;
    c10d::BroadcastOptions from;
    from.rootRank = rank;
    Tensors carried{gathered[0][rank]};
    launched.carriers.push_back(carrier_->broadcast(carried, from));
  }
}

HcclBackend::WorkPointer HcclBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions&) {
  if (graph::recording()) {
    TORCH_CHECK_NOT_IMPLEMENTED(inputs.size() == 1, "all_gather of several tensors is not emulated in a graph");
    return record("all_gather", outputs[0], inputs, [=](Tensors& gathered, Tensors& own) {
      std::vector<Tensors> lists{gathered};
      return allgather(lists, own, {});
    });
  }
  const CollectiveScope scope;
  const auto flat = flat_buffer(outputs[0]);
  auto launched = begin("all_gather", bytes_of(inputs));
  for (size_t index = 0; index < inputs.size(); ++index) launch_all_gather(launched, outputs[index], inputs[index]);
  return complete(std::move(launched), outputs[0]);
}

HcclBackend::WorkPointer HcclBackend::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) {
  if (graph::recording())
    return record("all_gather", {output}, {input},
                  [=](Tensors& outputs, Tensors& inputs) { return _allgather_base(outputs[0], inputs[0], {}); });
  const CollectiveScope scope;
  TORCH_CHECK(output.numel() == input.numel() * size_, "all_gather_into_tensor: the output needs ", size_,
              " times the elements of the input, has ", output.numel(), " for ", input.numel());
  auto launched = begin("all_gather", bytes_of(input));
  const ResultBuffer whole(output);
  launch_all_gather(launched, whole.contiguous.view({size_, -1}).unbind(0), host_alias(input));
  if (!whole.in_place()) launched.finish.push_back(whole.write_back());
  return complete(std::move(launched), {output});
}

HcclBackend::WorkPointer HcclBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions&) {
  const CollectiveScope scope;
  auto launched = begin("all_gather", bytes_of(inputs));
  for (size_t index = 0; index < inputs.size(); ++index) {
    Tensors of_each_rank;
    for (const auto& of_rank : outputs) of_each_rank.push_back(of_rank[index]);
    launch_all_gather(launched, of_each_rank, inputs[index]);
  }
  return complete(std::move(launched), outputs[0]);
}

HcclBackend::WorkPointer HcclBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                      const c10d::AllgatherOptions& options) {
  std::vector<WorkPointer> works;
  for (size_t index = 0; index < inputs.size(); ++index)
    works.push_back(_allgather_base(outputs[index], inputs[index], options));
  return c10::make_intrusive<HcclWork>(std::move(works), nullptr, outputs, nullptr);
}

HcclBackend::WorkPointer HcclBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::GatherOptions& options) {
  const CollectiveScope scope;
  auto launched = begin("gather", bytes_of(inputs));
  const auto own = host_bytes(inputs[0]);
  std::vector<Tensors> gathered;
  if (rank_ == options.rootRank) {
    gathered.emplace_back();
    for (const auto& output : outputs[0]) {
      const ResultBuffer buffer(output);
      gathered[0].push_back(buffer.bytes);
      if (!buffer.in_place()) launched.finish.push_back(buffer.write_back());
    }
  }
  Tensors carried{own};
  if (own.numel()) launched.carriers.push_back(carrier_->gather(gathered, carried, options));
  return complete(std::move(launched), rank_ == options.rootRank ? outputs[0] : Tensors{});
}

HcclBackend::WorkPointer HcclBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                              const c10d::ScatterOptions& options) {
  const CollectiveScope scope;
  auto launched = begin("scatter", inputs.empty() ? 0 : bytes_of(inputs[0]));
  const ResultBuffer own(outputs[0]);
  std::vector<Tensors> parts;
  for (const auto& list : inputs) {
    parts.emplace_back();
    for (const auto& part : list) parts.back().push_back(host_bytes(part));
  }
  Tensors carried{own.bytes};
  if (own.bytes.numel()) launched.carriers.push_back(carrier_->scatter(carried, parts, options));
  if (!own.in_place()) launched.finish.push_back(own.write_back());
  return complete(std::move(launched), outputs);
}

// Each rank gets its part from every rank and adds them up in the order of the ranks.
void HcclBackend::launch_reduce_scatter(Launched& launched, const Tensor& output, const Tensors& inputs,
                                        const ReduceOp& op) {
  check_reduction(op);
  const auto host = host_alias(output);
  std::vector<int64_t> sent_bytes;
  Tensors parts;
  for (const auto& input : inputs) {
    parts.push_back(host_alias(input).reshape({-1}));
    sent_bytes.push_back(bytes_of(input));
  }
  TORCH_CHECK(sent_bytes[rank_] == bytes_of(output), "reduce_scatter: the output of this rank has ", bytes_of(output),
              " bytes, its part of the input ", sent_bytes[rank_]);
  const auto sent = parts.size() == 1 ? parts[0].contiguous() : at::cat(parts);
  auto received = at::empty({size_, host.numel()}, host.options());
  launch_all_to_all(launched, as_bytes(received), as_bytes(sent), std::vector<int64_t>(size_, bytes_of(output)),
                    sent_bytes);
  const auto reduction = reduction_on(host, op);
  const bool average = op == ReduceOp::AVG;
  launched.finish.push_back([=, sent = sent, size = size_]() mutable {
    if (host.scalar_type() == at::kBool) received = received.view(at::kByte);
    auto sum = received[0];
    for (int rank = 1; rank < size; ++rank) accumulate(sum, received[rank], reduction);
    if (average) divide_by_ranks(sum, size);
    host.copy_(sum.view(host.sizes()));
  });
}

HcclBackend::WorkPointer HcclBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  if (graph::recording()) {
    TORCH_CHECK_NOT_IMPLEMENTED(inputs.size() == 1, "reduce_scatter of several tensors is not emulated in a graph");
    return record("reduce_scatter", outputs, inputs[0], [=](Tensors& own, Tensors& parts) {
      std::vector<Tensors> lists{parts};
      return reduce_scatter(own, lists, options);
    });
  }
  const CollectiveScope scope;
  const auto flat = flat_buffer(inputs[0]);
  int64_t bytes = 0;
  for (const auto& parts : inputs) bytes += bytes_of(parts);
  auto launched = begin("reduce_scatter", bytes);
  for (size_t index = 0; index < outputs.size(); ++index)
    launch_reduce_scatter(launched, outputs[index], inputs[index], options.reduceOp);
  return complete(std::move(launched), outputs);
}

HcclBackend::WorkPointer HcclBackend::_reduce_scatter_base(Tensor& output, Tensor& input,
                                                           const c10d::ReduceScatterOptions& options) {
  if (graph::recording())
    return record("reduce_scatter", {output}, {input}, [=](Tensors& outputs, Tensors& inputs) {
      return _reduce_scatter_base(outputs[0], inputs[0], options);
    });
  const CollectiveScope scope;
  TORCH_CHECK(input.numel() == output.numel() * size_, "reduce_scatter_tensor: the input needs ", size_,
              " times the elements of the output, has ", input.numel(), " for ", output.numel());
  auto launched = begin("reduce_scatter", bytes_of(input));
  launch_reduce_scatter(launched, output, host_alias(input).contiguous().view({size_, -1}).unbind(0),
                        options.reduceOp);
  return complete(std::move(launched), {output});
}

HcclBackend::WorkPointer HcclBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                      const c10d::ReduceScatterOptions& options) {
  std::vector<WorkPointer> works;
  for (size_t index = 0; index < inputs.size(); ++index)
    works.push_back(_reduce_scatter_base(outputs[index], inputs[index], options));
  return c10::make_intrusive<HcclWork>(std::move(works), nullptr, outputs, nullptr);
}

void HcclBackend::launch_all_to_all(Launched& launched, Tensor received, Tensor sent,
                                    std::vector<int64_t> received_bytes, std::vector<int64_t> sent_bytes) {
  if (size_ == 1) {
    received.copy_(sent);
    return;
  }
  launched.carriers.push_back(carrier_->alltoall_base(received, sent, received_bytes, sent_bytes, {}));
}

namespace {

// Bytes for each rank from a number of rows of dimension 0 for each rank; no numbers mean equal parts.
std::vector<int64_t> split_bytes(const Tensor& tensor, const std::vector<int64_t>& splits, int size,
                                 const char* which) {
  const auto rows = tensor.dim() ? tensor.size(0) : 1;
  if (splits.empty()) {
    TORCH_CHECK(rows % size == 0, "all_to_all_single: ", which, " has ", rows, " rows, not divisible by ", size,
                " ranks");
    return std::vector<int64_t>(size, bytes_of(tensor) / size);
  }
  TORCH_CHECK(static_cast<int>(splits.size()) == size, "all_to_all_single: ", splits.size(), " split sizes of the ",
              which, " for ", size, " ranks");
  TORCH_CHECK(std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
              "all_to_all_single: split sizes of the ", which, " do not add up to its ", rows, " rows");
  std::vector<int64_t> bytes;
  for (const auto split : splits) bytes.push_back(rows ? split * (bytes_of(tensor) / rows) : 0);
  return bytes;
}

}  // namespace

HcclBackend::WorkPointer HcclBackend::alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                                                    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) {
  if (graph::recording())
    return record("all_to_all", {output}, {input}, [=](Tensors& outputs, Tensors& inputs) mutable {
      return alltoall_base(outputs[0], inputs[0], output_splits, input_splits, {});
    });
  const CollectiveScope scope;
  auto launched = begin("all_to_all", bytes_of(input));
  const ResultBuffer received(output);
  launch_all_to_all(launched, received.bytes, host_bytes(input), split_bytes(output, output_splits, size_, "output"),
                    split_bytes(input, input_splits, size_, "input"));
  if (!received.in_place()) launched.finish.push_back(received.write_back());
  return complete(std::move(launched), {output});
}

HcclBackend::WorkPointer HcclBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  if (graph::recording())
    return record("all_to_all", outputs, inputs,
                  [=](Tensors& received, Tensors& sent) { return alltoall(received, sent, {}); });
  const CollectiveScope scope;
  const auto flat_inputs = flat_buffer(inputs), flat_outputs = flat_buffer(outputs);
  auto launched = begin("all_to_all", bytes_of(inputs));
  Tensors parts;
  std::vector<int64_t> sent_bytes, received_bytes;
  for (const auto& input : inputs) {
    parts.push_back(host_bytes(input));
    sent_bytes.push_back(bytes_of(input));
  }
  for (const auto& output : outputs) received_bytes.push_back(bytes_of(output));
  const auto received = at::empty({bytes_of(outputs)}, at::kByte);
  launch_all_to_all(launched, received, at::cat(parts), received_bytes, sent_bytes);
  int64_t start = 0;
  for (const auto& output : outputs) {
    const ResultBuffer buffer(output);
    const auto part = received.narrow(0, start, bytes_of(output));
    launched.finish.push_back([=] { buffer.bytes.copy_(part); });
    if (!buffer.in_place()) launched.finish.push_back(buffer.write_back());
    start += bytes_of(output);
  }
  return complete(std::move(launched), outputs);
}

HcclBackend::WorkPointer HcclBackend::send(Tensors& tensors, int destination, int tag) {
  const CollectiveScope scope;
  auto launched = begin("send", bytes_of(tensors), /*collective=*/false);
  Tensors carried{host_bytes(tensors[0])};
  launched.carriers.push_back(carrier_->send(carried, destination, tag));
  // Until it is sent, the buffer has to stay.
  launched.finish.push_back([carried] {});
  return point_to_point(std::move(launched), tensors);
}

HcclBackend::WorkPointer HcclBackend::recv(Tensors& tensors, int source, int tag) {
  const CollectiveScope scope;
  auto launched = begin("recv", bytes_of(tensors), /*collective=*/false);
  const ResultBuffer buffer(tensors[0]);
  Tensors carried{buffer.bytes};
  launched.carriers.push_back(carrier_->recv(carried, source, tag));
  launched.finish.push_back(buffer.in_place() ? std::function<void()>([carried] {}) : buffer.write_back());
  return point_to_point(std::move(launched), tensors);
}

HcclBackend::WorkPointer HcclBackend::recvAnysource(Tensors& tensors, int tag) {
  const CollectiveScope scope;
  auto launched = begin("recv", bytes_of(tensors), /*collective=*/false);
  const ResultBuffer buffer(tensors[0]);
  Tensors carried{buffer.bytes};
  launched.carriers.push_back(carrier_->recvAnysource(carried, tag));
  launched.finish.push_back(buffer.in_place() ? std::function<void()>([carried] {}) : buffer.write_back());
  return point_to_point(std::move(launched), tensors);
}

HcclBackend::WorkPointer HcclBackend::barrier(const c10d::BarrierOptions& options) {
  const CollectiveScope scope;
  auto launched = begin("barrier", 0);
  c10d::BarrierOptions on_host;
  on_host.timeout = options.timeout;
  if (size_ > 1) launched.carriers.push_back(carrier_->barrier(on_host));
  const auto computing = std::move(launched.computing);
  auto work = point_to_point(std::move(launched), {});
  work->wait();
  return work;
}

void set_deferred_collectives(bool value) { deferred = value; }
bool deferred_collectives() { return deferred; }

void complete_deferred_collectives() {
  std::vector<c10::intrusive_ptr<c10d::Work>> pending;
  {
    std::lock_guard<std::mutex> lock(deferred_works().mutex);
    pending.swap(deferred_works().pending);
  }
  for (const auto& work : pending) work->wait();
}

}  // namespace npu
