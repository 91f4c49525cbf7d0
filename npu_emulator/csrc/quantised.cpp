// Quantisation to whole numbers of 8 bits, and of 4 bits of which an int32 holds eight, the first in its lowest bits;
// products of such numbers, whose sums are exact; and norms and activations with either around them.
#include "quantised.h"

#include "headers.h"

using namespace cann;

namespace {

constexpr int64_t kOffsetBit = 37;  // of a scale of 64 bits: where nine bits of the offset begin
constexpr int64_t kOffsetMask = 0x1ff, kWithSign = int64_t{1} << 46;

Tensor packed(const Tensor& numbers) {
  const auto bytes = numbers.to(at::kChar).contiguous().view(at::kByte).bitwise_and(0xf).unflatten(-1, {-1, 2});
  return bytes.select(-1, 0).bitwise_or(bytes.select(-1, 1).bitwise_left_shift(4)).contiguous().view(at::kInt);
}

Tensor unpacked(const Tensor& packed) {
  const auto bytes = packed.contiguous().view(at::kByte);
  const auto low = bytes.bitwise_left_shift(4).view(at::kChar).bitwise_right_shift(4);
  return at::stack({low, bytes.view(at::kChar).bitwise_right_shift(4)}, -1).flatten(-2);
}

// Stores what was quantised: as int8, or packed in int32.
void put_quantised(const Tensor& out, const Tensor& values) {
  if (!out.defined() || !out.numel()) return;
  const auto rounded = at::round(values);
  if (out.scalar_type() == at::kInt) put(out, packed(rounded.clamp(-8, 7)));
  else put(out, rounded.clamp(-128, 127));
}

void ascend_quant(const Tensor& self, const Tensor& scale, const Tensor& offset, bool is_root, const std::string& round,
                  int64_t axis, const Tensor& out) {
  TORCH_CHECK(round == "round", "round mode ", round, " is not emulated");
  const auto along = [&](const Tensor& factor) {
    const auto given = wide(factor);
    return axis == -2 && given.dim() == 1 && given.numel() > 1 ? given.unsqueeze(-1) : given;
  };
  auto values = wide(self) * along(scale);
  if (is_root) values = values * along(scale);
  put_quantised(out, offset.defined() ? values + along(offset) : values);
}

// Each row with its own scale, and its own offset where one is wanted. With groups, rows up to groups[i] have been
// multiplied by smooth[i].
void dynamic_quant(const Tensor& self, const Tensor& smooth, const Tensor& groups, const Tensor& out,
                   const Tensor& scale, const Tensor& offset) {
  auto values = wide(self);
  if (groups.defined()) {
    const auto rows = values.reshape({-1, values.size(-1)}).clone();
    const auto ends = whole_numbers(groups);
    int64_t start = 0;
    for (size_t group = 0; group < ends.size(); ++group) {
      if (ends[group] <= start) continue;
      rows.narrow(0, start, ends[group] - start).mul_(wide(smooth[static_cast<int64_t>(group)]));
      start = ends[group];
    }
    values = rows.view(values.sizes());
  } else if (smooth.defined()) {
    values = values * wide(smooth);
  }
  const double largest = out.scalar_type() == at::kInt ? 7 : 127;
  const bool has_offset = offset.defined() && offset.numel();
  const auto most = has_offset ? values.amax(-1, true) : values.abs().amax(-1, true);
  const auto step = has_offset ? (most - values.amin(-1, true)) / (2 * largest + 1) : most / largest;
  const auto divisor = step.masked_fill(step.eq(0), 1);
  const auto zero = has_offset ? largest - most / divisor : at::zeros_like(step);
  put_quantised(out, values / divisor + zero);
  put(scale, step.squeeze(-1));
  if (has_offset) put(offset, zero.squeeze(-1));
}

// A scale in float32. Of one in 64 bits, as TransQuantParamV2 makes it, that is the lower half.
Tensor factor(const Tensor& scale) {
  if (scale.scalar_type() != at::kLong) return wide(scale);
  return scale.contiguous().view(at::kInt).unflatten(-1, {-1, 2}).select(-1, 0).contiguous().view(at::kFloat);
}

}  // namespace

namespace cann {

Tensor whole_operand(const Tensor& given) {
  if (given.scalar_type() != at::kInt) return given;
  const bool is_transposed = given.dim() >= 2 && given.stride(-2) == 1 && given.stride(-1) == given.size(-2);
  return is_transposed ? unpacked(given.transpose(-1, -2)).transpose(-1, -2) : unpacked(given);
}

void quant_matmul(const Tensor& self, const Tensor& other, const Tensor& scale, const Tensor& offset,
                  const Tensor& of_rows, const Tensor& bias, const Tensor& out) {
  auto sum = at::matmul(whole_operand(self).to(at::kDouble), whole_operand(other).to(at::kDouble));
  const bool is_whole = bias.defined() && bias.numel() && bias.scalar_type() == at::kInt;
  if (is_whole) sum = sum + bias;
  if (out.scalar_type() == at::kInt) return put(out, sum);
  auto result = sum.to(at::kFloat) * factor(scale);
  if (of_rows.defined() && of_rows.numel()) result = result * wide(of_rows).reshape({-1, 1});
  if (bias.defined() && bias.numel() && !is_whole) result = result + wide(bias);
  if (out.scalar_type() != at::kChar) return put(out, result);
  if (offset.defined() && offset.numel()) result = result + wide(offset);
  put_quantised(out, result);
}

}  // namespace cann

namespace {

void refuse(const char* name, const Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || !tensor.numel(), name, " is not emulated");
}

// SwiGLU of a product of whole numbers, quantised again. With groups, group[i] says how many rows have the i-th scales.
void dequant_swiglu_quant(const Tensor& self, const Tensor& weight_scale, const Tensor& row_scale,
                          const Tensor& quant_scale, const Tensor& groups, bool is_left, bool is_dynamic,
                          const Tensor& out, const Tensor& scale) {
  const auto of_rows = [&](const Tensor& factor) {
    if (!groups.defined()) return wide(factor);
    const auto counts = groups.to(at::kLong);
    const auto rows = wide(factor).repeat_interleave(counts, 0);
    return at::constant_pad_nd(rows, {0, 0, 0, self.size(0) - rows.size(0)});
  };
  auto values = wide(self);
  if (weight_scale.defined()) values = values * of_rows(weight_scale);
  if (row_scale.defined()) values = values * wide(row_scale).reshape({-1, 1});
  const auto [left, right] = halves_of(values, -1);
  auto result = is_left ? at::silu(left) * right : at::silu(right) * left;
  if (quant_scale.defined()) result = result * of_rows(quant_scale);
  if (is_dynamic) dynamic_quant(result, {}, {}, out, scale, {});
  else put_quantised(out, result);
}

}  // namespace

OP(AscendQuant, [](Tensor self, Tensor scale, Tensor offset, bool is_root, std::string round, DType, Tensor out) {
  ascend_quant(self, scale, offset, is_root, round, -1, out);
})
OP(AscendQuantV3, [](Tensor self, Tensor scale, Tensor offset, bool is_root, std::string round, DType, int64_t axis,
                     Tensor out) { ascend_quant(self, scale, offset, is_root, round, axis, out); })
OP(DynamicQuant, [](Tensor self, Tensor smooth, Tensor out, Tensor scale) {
  dynamic_quant(self, smooth, {}, out, scale, {});
})
OP(DynamicQuantV2, [](Tensor self, Tensor smooth, Tensor groups, int32_t, Tensor out, Tensor scale, Tensor offset) {
  dynamic_quant(self, smooth, groups, out, scale, offset);
})

// A scale as the cube unit reads it, in 64 bits: the upper 19 bits of the float32, nine bits of the offset, and a bit
// that says that results have signs.
namespace {

void pack_scale(const Tensor& scale, const Tensor& offset, const Tensor& out) {
  auto bits = scale.to(at::kFloat).contiguous().view(at::kInt).to(at::kLong).bitwise_and(0xffffe000).bitwise_or(kWithSign);
  if (offset.defined() && offset.numel()) {
    const auto whole = at::round(wide(offset)).clamp(-256, 255).to(at::kLong).bitwise_and(kOffsetMask);
    bits = bits.bitwise_or(whole.bitwise_left_shift(kOffsetBit));
  }
  put(out, bits.expand_as(out));
}

}  // namespace

OP(TransQuantParamV2, [](Tensor scale, Tensor offset, Tensor out) { pack_scale(scale, offset, out); })
OP(TransQuantParamV3, [](Tensor scale, Tensor offset, int64_t round_mode, Tensor out) {
  TORCH_CHECK(round_mode == 0, "round_mode ", round_mode, " is not emulated");
  pack_scale(scale, offset, out);
})

OP(QuantMatmulV3, [](Tensor self, Weight other, Tensor scale, Tensor offset, Tensor bias, bool is_transposed,
                     bool other_is_transposed, Tensor out) {
  TORCH_CHECK(!is_transposed && !other_is_transposed, "transposed operands are not emulated");
  quant_matmul(self, other, scale, offset, {}, bias, out);
})
OP(QuantMatmulV4, [](Tensor self, Weight other, Tensor scale, Tensor offset, Tensor of_rows, Tensor bias,
                     bool is_transposed, bool other_is_transposed, Tensor out) {
  TORCH_CHECK(!is_transposed && !other_is_transposed, "transposed operands are not emulated");
  quant_matmul(self, other, scale, offset, of_rows, bias, out);
})
#define QUANT_MATMUL_WITH_OFFSETS(NAME, WIDTH)                                                                            \
  OP(NAME, [](Tensor self, Weight other, Tensor of_rows, Tensor scale, Tensor out_scale, Tensor self_offset,              \
              Tensor offset, Tensor out_offset, Tensor bias, bool is_transposed, bool other_is_transposed,                \
              WIDTH group_size, Tensor out) {                                                                             \
    TORCH_CHECK(!is_transposed && !other_is_transposed, "transposed operands are not emulated");                          \
    TORCH_CHECK(group_size == 0, "groupSize ", group_size, " is not emulated");                                           \
    refuse("yScale", out_scale);                                                                                          \
    refuse("x1Offset", self_offset);                                                                                      \
    refuse("yOffset", out_offset);                                                                                        \
    quant_matmul(self, other, scale, offset, of_rows, bias, out);                                                         \
  })
QUANT_MATMUL_WITH_OFFSETS(QuantMatmulWeightNz, int32_t)
#if NPU_EMULATOR_CANN_9
QUANT_MATMUL_WITH_OFFSETS(QuantMatmulV5, int64_t)
#endif

namespace {

struct Scaled {
  Tensor scale, offset, out;
};

// `plain` takes what is normalised before the bias is added.
void add_rms_norm_quant(const Tensor& added, const Tensor& weight, const Tensor& bias, double epsilon, bool divides,
                        std::initializer_list<Scaled> results, const Tensor& plain) {
  Ints dims;
  for (auto dim = added.dim() - weight.dim(); dim < added.dim(); ++dim) dims.push_back(dim);
  auto normal = added * at::rsqrt(added.square().mean(dims, true) + epsilon) * wide(weight);
  if (plain.defined()) put(plain, normal);
  if (bias.defined()) normal = normal + wide(bias);
  for (const auto& [scale, offset, out] : results) {
    if (!scale.defined() || !scale.numel()) continue;
    const auto values = divides ? normal / wide(scale) : normal * wide(scale);
    put_quantised(out, offset.defined() && offset.numel() ? values + wide(offset) : values);
  }
}

}  // namespace

OP(AddRmsNormQuant, [](Tensor first, Tensor second, Tensor weight, Tensor scale1, Tensor scale2, Tensor offset1,
                       Tensor offset2, int64_t, double epsilon, bool divides, Tensor out1, Tensor out2, Tensor sum) {
  const auto added = wide(first) + wide(second);
  add_rms_norm_quant(added, weight, {}, epsilon, divides, {{scale1, offset1, out1}, {scale2, offset2, out2}}, {});
  put(sum, added);
})
#if NPU_EMULATOR_CANN_9
OP(AddRmsNormQuantV2, [](Tensor first, Tensor second, Tensor weight, Tensor scale1, Tensor scale2, Tensor offset1,
                         Tensor offset2, Tensor bias, int64_t, double epsilon, bool divides, Tensor out1, Tensor out2,
                         Tensor sum, Tensor plain) {
  const auto added = wide(first) + wide(second);
  add_rms_norm_quant(added, weight, bias, epsilon, divides, {{scale1, offset1, out1}, {scale2, offset2, out2}}, plain);
  put(sum, added);
})
#endif

OP(DequantSwigluQuant, [](Tensor self, Tensor weight_scale, Tensor row_scale, Tensor bias, Tensor quant_scale,
                          Tensor quant_offset, Tensor groups, bool is_left, std::string mode, Tensor out,
                          Tensor scale) {
  refuse("bias", bias);
  refuse("quant_offset", quant_offset);
  dequant_swiglu_quant(self, weight_scale, row_scale, quant_scale, groups, is_left, mode == "dynamic", out, scale);
})
