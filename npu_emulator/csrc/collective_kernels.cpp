// MC2, kernels with a collective inside: tokens sent to the ranks of their experts and back, and matrix products of
// tensor parallel groups. A group is named by its communicator; every rank shows what it gives, and reads what it needs.
#include <cstring>
#include <limits>

#include "operators.h"
#include "quantised.h"
#include "shared_group.h"

using namespace cann;

namespace {

constexpr int kInfo = 3;  // rank, token and choice of a row, as the kernels of Atlas A3 keep them

// The group, and what holds for both directions.
struct Experts {
  std::string group;
  int64_t ranks, rank, count, tensor_parallel, shared, shared_ranks;

  SharedGroup& open() const {
    TORCH_CHECK(tensor_parallel <= 1, "a tensor parallel group (tp_world_size ", tensor_parallel, ") is not emulated");
    TORCH_CHECK(shared_ranks == 0, "ranks of shared experts (shared_expert_rank_num ", shared_ranks,
                ") are not emulated");
    auto& found = group_named(group);
    TORCH_CHECK(found.ranks == ranks && found.rank == rank, "the communicator ", group, " has rank ", found.rank, " of ",
                found.ranks, ", not ", rank, " of ", ranks);
    TORCH_CHECK(count % ranks == 0, count, " experts cannot be divided among ", ranks, " ranks");
    return found;
  }
  int64_t local() const { return count / ranks; }
};

// Tensors of one rank, one after another, for the others to read: their sizes and types are known to all but for the
// number of rows, so that each is a length in bytes and the bytes.
class Parcel {
 public:
  void add(const Tensor& tensor) { tensors_.push_back(tensor.contiguous()); }
  size_t bytes() const {
    size_t total = 0;
    for (const auto& tensor : tensors_) total += sizeof(int64_t) + padded(tensor.nbytes());
    return total;
  }
  SharedGroup::Fill fill() const {
    return [this](char* area) { write(area); };
  }
  void write(char* area) const {
    for (const auto& tensor : tensors_) {
      const int64_t size = static_cast<int64_t>(tensor.nbytes());
      std::memcpy(area, &size, sizeof size);
      if (size) std::memcpy(area + sizeof size, tensor.data_ptr(), size);
      area += sizeof size + padded(size);
    }
  }
  // The tensor that begins at `area`, flat, and where the next one begins.
  static Tensor read(const char*& area, at::ScalarType dtype) {
    int64_t size;
    std::memcpy(&size, area, sizeof size);
    const auto tensor = at::from_blob(const_cast<char*>(area + sizeof size),
                                      {size / static_cast<int64_t>(c10::elementSize(dtype))},
                                      at::TensorOptions().dtype(dtype));
    area += sizeof size + padded(size);
    return tensor;
  }

 private:
  static size_t padded(size_t bytes) { return (bytes + 15) / 16 * 16; }
  std::vector<Tensor> tensors_;
};

// Numbers of the (token, choice) pairs that take part, in the order of their experts, then of the tokens.
Tensor active_entries(const Tensor& experts, const Tensor& active) {
  const auto order = at::argsort(experts.flatten(), true, 0, false);
  if (!active.defined() || !active.numel()) return order;
  const auto kept = active.to(at::kBool).repeat_interleave(experts.size(1)).index_select(0, order);
  return order.masked_select(kept);
}

void demand_choices(const Tensor& ids) {
  constexpr int64_t kMostChoices = 8, kMostTokens = 512;
  demand_that(ids.size(1) <= kMostChoices, "Tensor expertIds", "must have at most 8 columns");
  demand_that(ids.size(0) <= kMostTokens, "Tensor expertIds", "must have at most 512 rows");
}

struct Dispatched {
  Tensor rows, info, per_expert, received, tensor_parallel_received;
};

void dispatch(const Experts& experts, const Tensor& x, const Tensor& ids, const Tensor& active, bool wants_counts,
              bool has_origins, const Dispatched& out) {
  constexpr int64_t kWidest = 7168;
  demand_choices(ids);
  demand_that(x.size(1) <= kWidest, "Tensor x", "must have at most 7168 columns");
  auto& group = experts.open();
  const int64_t k = ids.size(1), local = experts.local();
  const auto entries = active_entries(ids, active);
  const auto chosen = ids.flatten().to(at::kLong).index_select(0, entries);
  Parcel parcel;
  parcel.add(chosen);
  parcel.add(entries);
  parcel.add(x.index_select(0, entries.div(k, "floor")));
  out.rows.fill_(at::isFloatingType(out.rows.scalar_type()) ? Scalar(std::numeric_limits<float>::quiet_NaN()) : Scalar(0));
  for (const auto& numbers : {out.info, out.tensor_parallel_received}) numbers.zero_();
  const auto row = c10::str(x.size(1), " x ", x.scalar_type());
  group.exchange("MoeDistributeDispatch", row, parcel.bytes(), parcel.fill(), [&] {
    Tensors theirs, numbers, rows;  // by rank: the expert, the pair and the row of what it sends
    for (int rank = 0; rank < group.ranks; ++rank) {
      const char* area = group.given(rank);
      theirs.push_back(Parcel::read(area, at::kLong));
      numbers.push_back(Parcel::read(area, at::kLong));
      rows.push_back(Parcel::read(area, x.scalar_type()).view({-1, x.size(1)}));
    }
    int64_t written = 0;
    for (int64_t expert = 0; expert < local; ++expert) {
      const auto before = written;
      for (int rank = 0; rank < group.ranks; ++rank) {
        const auto mine = theirs[rank].eq(experts.rank * local + expert).nonzero().squeeze(1);
        const auto count = mine.numel();
        TORCH_CHECK(written + count <= out.rows.size(0), "more rows than ", out.rows.size(0), ": global_bs is too small");
        out.rows.narrow(0, written, count).copy_(rows[rank].index_select(0, mine));
        if (has_origins && count) {
          const auto pairs = numbers[rank].index_select(0, mine);
          const auto origins = at::stack({at::full_like(pairs, rank), pairs.div(k, "floor"), pairs.remainder(k)}, -1);
          out.info.narrow(0, kInfo * written, kInfo * count).copy_(origins.flatten());
        }
        written += count;
        out.received[expert * group.ranks + rank].fill_(written);
      }
      out.per_expert[expert].fill_(wants_counts ? written - before : written);
    }
  });
  if (has_origins) return;
  // The number of each pair among the rows that go from here to its expert.
  const auto sent = at::bincount(chosen, {}, experts.count), starts = sent.cumsum(0) - sent;
  const auto number = at::arange(entries.numel(), at::kLong) - starts.index_select(0, chosen);
  out.info.index_copy_(0, entries, number.to(out.info.scalar_type()));
}

// For each token the sum of its experts' rows by their weights, in float32.
void combine(const Experts& experts, const Tensor& rows, const Tensor& ids, const Tensor& info, const Tensor& received,
             const Tensor& weights, const Tensor& active, bool has_origins, const Tensor& out) {
  demand_choices(ids);
  auto& group = experts.open();
  const int64_t tokens = ids.size(0), k = ids.size(1), local = experts.local(), size = rows.size(-1);
  const auto held = received.flatten().slice(0, -1).item<int64_t>();
  Parcel parcel;
  parcel.add(received.to(at::kLong));
  parcel.add(has_origins ? info.narrow(0, 0, kInfo * held).to(at::kLong) : at::empty({0}, at::kLong));
  parcel.add(rows.narrow(0, 0, held));
  const auto choices = at::zeros({tokens * k, size}, at::kFloat);
  group.exchange("MoeDistributeCombine", c10::str(size, " x ", rows.scalar_type()), parcel.bytes(), parcel.fill(), [&] {
    const auto entries = active_entries(ids, active);
    const auto chosen = ids.flatten().to(at::kLong).index_select(0, entries);
    for (int rank = 0; rank < group.ranks; ++rank) {
      const char* area = group.given(rank);
      const auto ends = Parcel::read(area, at::kLong);
      const auto origins = Parcel::read(area, at::kLong).view({-1, kInfo});
      const auto theirs = Parcel::read(area, rows.scalar_type()).view({-1, size});
      if (has_origins) {
        const auto mine = origins.select(1, 0).eq(experts.rank).nonzero().squeeze(1);
        const auto pairs = origins.select(1, 1) * k + origins.select(1, 2);
        choices.index_copy_(0, pairs.index_select(0, mine), theirs.index_select(0, mine).to(at::kFloat));
        continue;
      }
      const auto mine = chosen.div(local, "floor").eq(rank).nonzero().squeeze(1);
      const auto pairs = entries.index_select(0, mine);
      const auto part = chosen.index_select(0, mine).remainder(local) * group.ranks + experts.rank;
      const auto starts = at::cat({at::zeros({1}, at::kLong), ends.narrow(0, 0, ends.numel() - 1)});
      const auto places = starts.index_select(0, part) + info.flatten().to(at::kLong).index_select(0, pairs);
      choices.index_copy_(0, pairs, theirs.index_select(0, places).to(at::kFloat));
    }
  });
  put(out, (choices.view({tokens, k, size}) * wide(weights).unsqueeze(-1)).sum(1));
}

}  // namespace

OP(MoeDistributeDispatch,
   [](Tensor x, Tensor ids, Tensor scales, Tensor active, Tensor, std::string group, int64_t ranks, int64_t rank,
      int64_t experts, std::string, int64_t tp_ranks, int64_t, int64_t, int64_t shared, int64_t shared_ranks,
      int64_t quant_mode, int64_t, int64_t counts_type, Tensor rows, Tensor, Tensor info, Tensor per_expert,
      Tensor received, Tensor tp_received, Tensor) {
     refuse_given("scales", scales);
     TORCH_CHECK(quant_mode == 0, "quant_mode ", quant_mode, " is not emulated");
     dispatch({group, ranks, rank, experts, tp_ranks, shared, shared_ranks}, x, ids, active, counts_type == 1, false,
              {rows, info, per_expert, received, tp_received});
   })
OP(MoeDistributeDispatchV2,
   [](Tensor x, Tensor ids, Tensor scales, Tensor active, Tensor, std::string group, int64_t ranks, int64_t rank,
      int64_t experts, std::string, int64_t tp_ranks, int64_t, int64_t, int64_t shared, int64_t shared_ranks,
      int64_t quant_mode, int64_t, int64_t counts_type, std::string, Tensor rows, Tensor, Tensor info,
      Tensor per_expert, Tensor received, Tensor tp_received, Tensor) {
     refuse_given("scales", scales);
     TORCH_CHECK(quant_mode == 0, "quant_mode ", quant_mode, " is not emulated");
     dispatch({group, ranks, rank, experts, tp_ranks, shared, shared_ranks}, x, ids, active, counts_type == 1, true,
              {rows, info, per_expert, received, tp_received});
   })
OP(MoeDistributeCombine,
   [](Tensor rows, Tensor ids, Tensor info, Tensor received, Tensor weights, Tensor, Tensor active, Tensor act_scale,
      Tensor weight_scale, Tensor group_list, Tensor, std::string group, int64_t ranks, int64_t rank, int64_t experts,
      std::string, int64_t tp_ranks, int64_t, int64_t, int64_t shared, int64_t shared_ranks, int64_t, int64_t,
      int64_t quant_mode, int64_t, Tensor out) {
     for (const auto& tensor : {act_scale, weight_scale, group_list}) refuse_given("quantisation", tensor);
     TORCH_CHECK(quant_mode == 0, "comm_quant_mode ", quant_mode, " is not emulated");
     combine({group, ranks, rank, experts, tp_ranks, shared, shared_ranks}, rows, ids, info, received, weights, active,
             false, out);
   })
OP(MoeDistributeCombineV2,
   [](Tensor rows, Tensor ids, Tensor info, Tensor received, Tensor weights, Tensor, Tensor active, Tensor, Tensor,
      Tensor, Tensor, Tensor shared_x, std::string group, int64_t ranks, int64_t rank, int64_t experts, std::string,
      int64_t tp_ranks, int64_t, int64_t, int64_t shared, int64_t shared_ranks, int64_t, int64_t, int64_t quant_mode,
      int64_t, std::string, Tensor out) {
     refuse_given("shared_expert_x", shared_x);
     TORCH_CHECK(quant_mode == 0, "comm_quant_mode ", quant_mode, " is not emulated");
     combine({group, ranks, rank, experts, tp_ranks, shared, shared_ranks}, rows, ids, info, received, weights, active,
             true, out);
   })

#if NPU_EMULATOR_CANN_9
namespace {

// Experts that compute nothing, ranks that come and go, and times of ranks: what CANN 9 adds.
void refuse_additions(const Tensor& elastic, const Tensor& performance, int64_t zeros, int64_t copies, int64_t constants) {
  refuse_given("elastic_info", elastic);
  refuse_given("performance_info", performance);
  TORCH_CHECK(zeros == 0 && copies == 0 && constants == 0, "zero_expert_num, copy_expert_num and const_expert_num ",
              zeros, ", ", copies, ", ", constants, " are not emulated");
}

}  // namespace

OP(MoeDistributeDispatchV4,
   [](Tensor x, Tensor ids, Tensor scales, Tensor active, Tensor, Tensor elastic, Tensor performance, std::string group,
      int64_t ranks, int64_t rank, int64_t experts, std::string, int64_t tp_ranks, int64_t, int64_t, int64_t shared,
      int64_t shared_ranks, int64_t quant_mode, int64_t, int64_t counts_type, std::string, int64_t zeros,
      int64_t copies, int64_t constants, Tensor rows, Tensor, Tensor info, Tensor per_expert, Tensor received,
      Tensor tp_received, Tensor) {
     refuse_given("scales", scales);
     refuse_additions(elastic, performance, zeros, copies, constants);
     TORCH_CHECK(quant_mode == 0, "quant_mode ", quant_mode, " is not emulated");
     dispatch({group, ranks, rank, experts, tp_ranks, shared, shared_ranks}, x, ids, active, counts_type == 1, true,
              {rows, info, per_expert, received, tp_received});
   })
OP(MoeDistributeCombineV4,
   [](Tensor rows, Tensor ids, Tensor info, Tensor received, Tensor weights, Tensor, Tensor active, Tensor, Tensor,
      Tensor, Tensor, Tensor shared_x, Tensor elastic, Tensor, Tensor, Tensor, Tensor, Tensor performance,
      std::string group, int64_t ranks, int64_t rank, int64_t experts, std::string, int64_t tp_ranks, int64_t, int64_t,
      int64_t shared, int64_t shared_ranks, int64_t, int64_t, int64_t quant_mode, int64_t, std::string, int64_t zeros,
      int64_t copies, int64_t constants, Tensor out) {
     refuse_given("shared_expert_x", shared_x);
     refuse_additions(elastic, performance, zeros, copies, constants);
     TORCH_CHECK(quant_mode == 0, "comm_quant_mode ", quant_mode, " is not emulated");
     combine({group, ranks, rank, experts, tp_ranks, shared, shared_ranks}, rows, ids, info, received, weights, active,
             true, out);
   })
#endif

// ---- matrix products of tensor parallel groups
namespace {

Tensor product(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const auto result = at::matmul(operand(x), operand(weight)).to(x.scalar_type());
  return bias.defined() ? result + bias : result;
}

void demand_factors(const Tensor& x, const Tensor& weight) {
  constexpr int64_t kNarrowest = 256, kWidest = 65534;
  demand_that(x.size(-1) >= kNarrowest && x.size(-1) <= kWidest, "Tensor x1", "must have 256 to 65534 columns");
  demand_that(x.is_contiguous(), "Tensor x1", "must not be transposed");
  demand_type_of(x, "x1", weight, "x2");
}

// With a gathered input or a scattered result, kernels take no bias but zeros.
void demand_no_bias(const Tensor& bias) {
  demand_that(!is_strict() || !bias.defined() || !bias.any().item<bool>(), "Tensor bias", "must be zero");
}

// The rows from `first` on of the sum over ranks of what each gives, as HCCL adds up: in the order of ranks, in float32.
void sum_rows(const char* name, const std::string& group, const std::string& op, const Tensor& given, const Tensor& out,
              bool is_scattered) {
  TORCH_CHECK(op == "sum", "reduce_op ", op, " is not emulated");
  auto& ranks = group_named(group);
  TORCH_CHECK(!is_scattered || given.size(0) == ranks.ranks * out.size(0), given.size(0), " rows for ", ranks.ranks,
              " ranks of the communicator do not divide into ", out.size(0), " for each");
  Parcel parcel;
  parcel.add(given);
  ranks.exchange(name, c10::str(given.sizes(), " x ", given.scalar_type()), parcel.bytes(), parcel.fill(), [&] {
    Tensor total;
    for (int rank = 0; rank < ranks.ranks; ++rank) {
      const char* area = ranks.given(rank);
      auto part = Parcel::read(area, given.scalar_type()).view(given.sizes());
      if (is_scattered) part = part.narrow(0, ranks.rank * out.size(0), out.size(0));
      total = total.defined() ? total + wide(part) : wide(part).clone();
    }
    put(out, total);
  });
}

// Sums over ranks of products of whole numbers with their scales, `of_rows` among them, and of what each rank adds.
void sum_quantised(const char* name, const Tensor& self, const Tensor& weight, const Tensor& bias, const Tensor& added,
                   const Tensor& scale, const Tensor& of_rows, const std::string& group, const std::string& op,
                   const Tensor& out) {
  auto own = at::empty(out.sizes(), out.options());
  quant_matmul(self.flatten(0, -2), weight, scale, {}, of_rows, bias, own.flatten(0, -2));
  sum_rows(name, group, op, added.defined() ? own + added : own, out, false);
}

// Dequantises a weight of 8 or 4 bits to float32: a scale and an offset apply to the whole weight, to a column, or to
// `group_size` rows of a column.
Tensor dequantised(const Tensor& weight, const Tensor& scale, const Tensor& offset, int64_t group_size) {
  const auto numbers = whole_operand(weight).to(at::kFloat);
  const auto of_rows = [&](const Tensor& given) {
    const auto factors = wide(given);
    if (factors.dim() < 2 || factors.size(0) == 1) return factors;
    return factors.repeat_interleave(group_size, 0).narrow(0, 0, numbers.size(0));
  };
  return (offset.defined() ? numbers + of_rows(offset) : numbers) * of_rows(scale);
}

}  // namespace

OP(AllGatherMatmul, [](Tensor self, Tensor weight, Tensor bias, std::string group, int64_t gathered_input,
                       int64_t, int64_t, Tensor out, Tensor gathered) {
  demand_factors(self, weight);
  demand_no_bias(bias);
  TORCH_CHECK(gathered_input == 0, "gather_index ", gathered_input, " is not emulated");
  auto& ranks = group_named(group);
  Parcel parcel;
  parcel.add(self);
  Tensors parts;
  const auto factor = c10::str(self.sizes(), " x ", self.scalar_type());
  ranks.exchange("AllGatherMatmul", factor, parcel.bytes(), parcel.fill(), [&] {
    for (int rank = 0; rank < ranks.ranks; ++rank) {
      const char* area = ranks.given(rank);
      parts.push_back(Parcel::read(area, self.scalar_type()).view({-1, self.size(1)}).clone());
    }
  });
  const auto rows = at::cat(parts);
  put(out, product(rows, weight, bias));
  if (gathered.defined() && gathered.numel()) put(gathered, rows);
})
OP(MatmulReduceScatter, [](Tensor self, Tensor weight, Tensor bias, std::string group, std::string op, int64_t,
                           int64_t, Tensor out) {
  demand_factors(self, weight);
  demand_no_bias(bias);
  sum_rows("MatmulReduceScatter", group, op, product(self, weight, bias), out, true);
})
OP(MatmulAllReduce, [](Tensor self, Tensor weight, Tensor bias, std::string group, std::string op, int64_t,
                       int64_t, Tensor out) {
  demand_factors(self, weight);
  sum_rows("MatmulAllReduce", group, op, product(self, weight, bias), out, false);
})
OP(MatmulAllReduceV2, [](Tensor self, Tensor weight, Tensor bias, Tensor added, std::string group, std::string op,
                         int64_t, int64_t, Tensor out) {
  demand_factors(self, weight);
  const auto result = product(self, weight, bias);
  sum_rows("MatmulAllReduceV2", group, op, added.defined() ? result + added : result, out, false);
})
OP(QuantMatmulAllReduce, [](Tensor self, Tensor weight, Tensor bias, Tensor added, Tensor scale, std::string group,
                            std::string op, int64_t, int64_t, Tensor out) {
  sum_quantised("QuantMatmulAllReduce", self, weight, bias, added, scale, {}, group, op, out);
})
OP(QuantMatmulAllReduceV2, [](Tensor self, Tensor weight, Tensor bias, Tensor added, Tensor scale, Tensor of_rows,
                              std::string group, std::string op, int64_t, int64_t, Tensor out) {
  sum_quantised("QuantMatmulAllReduceV2", self, weight, bias, added, scale, of_rows, group, op, out);
})
OP(WeightQuantMatmulAllReduce, [](Tensor self, Tensor weight, Tensor bias, Tensor scale, Tensor offset, Tensor added,
                                  std::string group, std::string op, int64_t, int64_t, int64_t group_size,
                                  Tensor out) {
  auto own = at::matmul(wide(self), dequantised(weight, scale, offset, group_size));
  if (bias.defined()) own = own + wide(bias);
  if (added.defined()) own = own + wide(added);
  sum_rows("WeightQuantMatmulAllReduce", group, op, own.to(out.scalar_type()), out, false);
})
