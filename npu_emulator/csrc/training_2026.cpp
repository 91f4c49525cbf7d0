// Operators that trainers of 2026 reach and those of the pins do not: the fused loss of verl's log-probs, and what FSDP2
// lays gradients out with before it reduces them.
#include "operators.h"

using namespace cann;

namespace {

// The input that a loss and its gradient share: which rows count, their weights, and the divisor of their sum.
struct LossRows {
  Tensor place;    // [rows, 1]: the class of each row; class 0 where the row is ignored
  Tensor weight;   // [rows]: of the row's class; 0 where the row is ignored
  Tensor kept;     // [rows]: 1, or 0 where the row is ignored
  Tensor classes;  // [classes]: the weight of each class
  Tensor divisor;  // of the sum over rows
};

LossRows rows_of(const Tensor& log_prob, const Tensor& target, const Tensor& weight, const std::string& reduction,
                 int64_t ignored) {
  TORCH_CHECK(log_prob.dim() == 2 && target.dim() == 1 && target.size(0) == log_prob.size(0), "rows of shape ",
              log_prob.sizes(), " and targets of shape ", target.sizes(), " do not go together");
  TORCH_CHECK(reduction == "none" || reduction == "mean" || reduction == "sum", "reduction ", reduction);
  const auto count = log_prob.size(1);
  TORCH_CHECK(!weight.defined() || (weight.dim() == 1 && weight.size(0) == count), "weights of shape ", weight.sizes(),
              " for ", count, " classes");
  LossRows rows;
  const auto kept = target.ne(ignored);
  const auto classes = at::where(kept, target, at::zeros_like(target)).to(at::kLong);
  TORCH_CHECK(!classes.numel() || (classes.min().item<int64_t>() >= 0 && classes.max().item<int64_t>() < count),
              "a target is outside the ", count, " classes");
  rows.kept = kept.to(log_prob.scalar_type());
  rows.classes = weight.defined() ? weight.to(log_prob.scalar_type()) : at::ones({count}, log_prob.options());
  rows.place = classes.unsqueeze(1);
  rows.weight = rows.classes.index_select(0, classes) * rows.kept;
  rows.divisor = reduction == "mean" ? rows.weight.sum() : at::ones({}, log_prob.options());
  return rows;
}

void refuse_zloss(double scale, bool wanted) {
  demand_that(scale == 0, "lseSquareScaleForZloss", "must be 0");
  demand_that(!wanted, "returnZloss", "must be false");
  TORCH_CHECK(scale == 0 && !wanted, "the z-loss is not emulated");
}

void demand_smoothing(double smoothing) {
  demand_that(smoothing >= 0 && smoothing < 1, "labelSmoothing", "must be at least 0 and less than 1");
}

}  // namespace

OP(CrossEntropyLoss,
   [](Tensor input, Tensor target, Tensor weight, std::string reduction, int64_t ignored, double smoothing,
      double zloss_scale, bool zloss_wanted, Tensor loss, Tensor log_prob, Tensor, Tensor) {
     refuse_zloss(zloss_scale, zloss_wanted);
     demand_smoothing(smoothing);
     const auto logs = at::log_softmax(wide(input), -1);
     put(log_prob, logs);
     const auto rows = rows_of(logs, target, weight, reduction, ignored);
     auto each = -logs.gather(1, rows.place).squeeze(1) * rows.weight;
     if (smoothing != 0) {
       // As in torch: the other share of a row's label lies on all classes alike.
       const auto spread = -(logs * rows.classes).sum(1) * rows.kept / logs.size(1);
       each = each * (1 - smoothing) + spread * smoothing;
     }
     put(loss, reduction == "none" ? each : (each.sum() / rows.divisor).reshape(loss.sizes()));
   })
OP(CrossEntropyLossGrad,
   [](Tensor gradient, Tensor log_prob, Tensor target, Tensor weight, Tensor zloss_gradient, Tensor, std::string reduction,
      int64_t ignored, double smoothing, double zloss_scale, Tensor out) {
     refuse_zloss(zloss_scale, false);
     refuse_given("gradZlossOptional", zloss_gradient);
     demand_smoothing(smoothing);
     const auto logs = wide(log_prob);
     const auto rows = rows_of(logs, target, weight, reduction, ignored);
     const auto given = reduction == "none" ? wide(gradient).reshape({-1, 1}) : wide(gradient).reshape({1, 1});
     auto of_logs = at::zeros_like(logs).scatter(1, rows.place, -rows.weight.unsqueeze(1) * (1 - smoothing));
     if (smoothing != 0) of_logs = of_logs - rows.classes * rows.kept.unsqueeze(1) * (smoothing / logs.size(1));
     of_logs = of_logs * given / rows.divisor;
     put(out, of_logs - logs.exp() * of_logs.sum(1, true));
   })

#if NPU_EMULATOR_CANN_9
// Each tensor is cut into chunks along `dim`, padded with zeros; chunk i of all tensors, flattened, is row i.
OP(ChunkCat, [](Tensors tensors, int64_t dim, int64_t chunks, Tensor out) {
  TORCH_CHECK(!tensors.empty() && chunks > 0, tensors.size(), " tensors in ", chunks, " chunks");
  std::vector<Tensor> rows;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.defined() && dim >= 0 && dim < tensor.dim(), "dim ", dim, " of a tensor that has no such dimension");
    const auto size = tensor.size(dim), padded = (size + chunks - 1) / chunks * chunks;
    auto sizes = tensor.sizes().vec();
    sizes[dim] = padded;
    auto whole = at::zeros(sizes, tensor.options());
    whole.narrow(dim, 0, size).copy_(tensor);
    std::vector<int64_t> cut(sizes.begin(), sizes.begin() + dim);
    cut.insert(cut.end(), {chunks, padded ? whole.numel() / (c10::multiply_integers(cut) * chunks) : 0});
    rows.push_back(whole.reshape(cut));
  }
  put(out, at::cat(rows, -1));
})
#endif
