// The "hccl" process group backend: collectives between emulated dies, carried by gloo between their processes.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "recorder.h"

namespace npu {

// One collective under way. Its results are complete after wait().
class HcclWork final : public c10d::Work {
 public:
  using Carrier = c10::intrusive_ptr<c10d::Work>;

  // `carriers` move the bytes; `finish`, which may be empty, then puts results where they belong. When a carrier fails,
  // what `explain` gives comes first in the DistBackendError.
  HcclWork(std::vector<Carrier> carriers, std::function<void()> finish, std::vector<at::Tensor> outputs,
           std::function<std::string()> explain);

  bool isCompleted() override;
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  int sourceRank() const override;

 private:
  std::vector<Carrier> carriers_;
  std::function<void()> finish_;
  std::vector<at::Tensor> outputs_;
  std::function<std::string()> explain_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool done_ = false;
};

class HcclBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;

  // `store` is only used to find out which ranks are missing after a failure.
  HcclBackend(c10::intrusive_ptr<c10d::Backend> carrier, c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  const std::string getBackendName() const override { return "hccl"; }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override;
  WorkPointer allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions&) override;
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions&) override;
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& options) override;
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override;
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override;
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override;
  WorkPointer send(Tensors& tensors, int destination, int tag) override;
  WorkPointer recv(Tensors& tensors, int source, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;
  WorkPointer barrier(const c10d::BarrierOptions& options) override;

  void startCoalescing() override;
  WorkPointer endCoalescing() override;

  void setSequenceNumberForGroup() override { carrier_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return carrier_->getSequenceNumberForGroup(); }

 private:
  struct Launched {
    std::vector<WorkPointer> carriers;
    std::vector<std::function<void()>> finish;
    std::function<std::string()> explain;
    std::unique_ptr<recorder::Computing> computing;  // until the results are there
  };

  // Counts an operation of this rank, which is about to be launched.
  Launched begin(const char* kind, int64_t bytes, bool collective = true);

  void launch_all_reduce(Launched& launched, const at::Tensor& tensor, const c10d::ReduceOp& op);
  void launch_all_gather(Launched& launched, const Tensors& outputs, const at::Tensor& input);
  void launch_reduce_scatter(Launched& launched, const at::Tensor& output, const Tensors& inputs,
                             const c10d::ReduceOp& op);
  void launch_all_to_all(Launched& launched, at::Tensor received, at::Tensor sent, std::vector<int64_t> received_bytes,
                         std::vector<int64_t> sent_bytes);
  // Waits for the results, unless they are deferred until somebody waits for them.
  WorkPointer complete(Launched launched, Tensors outputs);
  WorkPointer point_to_point(Launched launched, Tensors outputs);
  // While a graph is captured nothing is exchanged: each replay takes part in the collective that `launch` begins, on
  // host tensors over `outputs` and `inputs`.
  WorkPointer record(const char* kind, const Tensors& outputs, const Tensors& inputs,
                     std::function<WorkPointer(Tensors&, Tensors&)> launch);

  c10::intrusive_ptr<c10d::Backend> carrier_;
  c10::intrusive_ptr<c10d::Store> store_;
  int64_t collectives_ = 0;
  std::vector<WorkPointer> coalesced_;
  bool coalescing_ = false;
};

// Deferred collectives complete only at wait() or at a synchronisation of the device, so that a missing wait shows.
void set_deferred_collectives(bool deferred);
bool deferred_collectives();
// Completes every deferred collective of this process.
void complete_deferred_collectives();

}  // namespace npu
