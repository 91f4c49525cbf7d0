// The symbols that vllm-ascend's own compiled module (vllm_ascend_C) needs beside torch_npu and the runtime: its
// kernels, which are compiled for the device, and the number of the device's cores. The module itself runs unchanged,
// with its allocator for sleep mode.
#include <cstring>
#include <stdexcept>
#include <string>

#include "headers.h"
#include "operators.h"

using namespace cann;

#define CANN_SHOWN __attribute__((visibility("default")))

namespace vllm_ascend {

enum struct AscendType { FP16 = 0, BF16 = 1, FP32 = 2 };

namespace {

Tensor of(void* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype));
}

}  // namespace

// Heads [tokens, heads, head size] turned by a row of a table for each token: cosines, then sines. With `is_neox` halves
// belong together, else neighbours. What lies behind `rotated` elements of a head is copied.
CANN_SHOWN void rotary_embedding_impl(AscendType type, bool is_neox, void* stream, int64_t* positions, void* query_out,
                                      void* key_out, void* query, void* key, void* table, const int rotated,
                                      const int64_t query_stride, const int64_t key_stride,
                                      const int64_t query_out_stride, const int64_t key_out_stride, const int heads,
                                      const int key_heads, const int head_size, const int64_t tokens, const uint32_t,
                                      uint32_t) {
  if (type != AscendType::FP16 && type != AscendType::BF16)
    throw std::runtime_error("vllm_ascend_C's rotary_embedding: this type is not emulated, and its kernel skips it");
  const auto dtype = type == AscendType::FP16 ? at::kHalf : at::kBFloat16;
  submit(stream, "rotary_embedding", [=] {
    const HostKernels guard;
    const auto at_token = at::from_blob(positions, {tokens}, at::TensorOptions().dtype(at::kLong));
    const auto rows = at_token.numel() ? at_token.max().item<int64_t>() + 1 : 0;
    const auto all = of(table, {rows, rotated}, {rotated, 1}, dtype);
    const auto halves = halves_of(wide(all.index_select(0, at_token)).unsqueeze(1), -1);
    const auto &cosines = halves.first, &sines = halves.second;
    const auto turn = [&](void* from, void* to, int64_t stride, int64_t stride_out, int64_t count) {
      const auto x = of(from, {tokens, count, head_size}, {stride, head_size, 1}, dtype);
      const auto out = of(to, {tokens, count, head_size}, {stride_out, head_size, 1}, dtype);
      const auto turning = wide(x.narrow(-1, 0, rotated));
      const auto pairs = is_neox ? turning.unflatten(-1, {2, -1}).transpose(-1, -2) : turning.unflatten(-1, {-1, 2});
      const auto first = pairs.select(-1, 0), second = pairs.select(-1, 1);
      const Tensors turned = {first * cosines - second * sines, second * cosines + first * sines};
      const auto result = is_neox ? at::cat(turned, -1) : at::stack(turned, -1).flatten(-2);
      const auto rest = x.slice(-1, rotated).clone();
      out.narrow(-1, 0, rotated).copy_(result);
      out.slice(-1, rotated).copy_(rest);
    };
    turn(query, query_out, query_stride, query_out_stride, heads);
    turn(key, key_out, key_stride, key_out_stride, key_heads);
  });
}

// Rows of this rank's part of the vocabulary, and where a token belongs to another rank.
CANN_SHOWN void get_masked_input_and_mask_impl(void* stream, void* input, void* masked_input, void* mask,
                                               const int64_t start, const int64_t end, const int64_t padding,
                                               const int64_t added_start, const int64_t added_end, const int64_t size,
                                               const uint32_t, const uint32_t) {
  submit(stream, "get_masked_input_and_mask", [=] {
    const auto* tokens = static_cast<const int32_t*>(input);
    for (int64_t index = 0; index < size; ++index) {
      const int64_t token = tokens[index];
      const bool is_original = token >= start && token < end, is_added = token >= added_start && token < added_end;
      const int64_t offset = is_original ? start : added_start - (end - start) - padding;
      static_cast<int32_t*>(masked_input)[index] =
          is_original || is_added ? static_cast<int32_t>(token - offset) : 0;
      static_cast<bool*>(mask)[index] = !(is_original || is_added);
    }
  });
}

CANN_SHOWN void launch_advance_step_flashattn(void*, int64_t, int64_t, int64_t, int64_t*, int64_t*, int64_t*, int32_t*,
                                              int32_t*, int32_t*, int64_t) {
  throw std::runtime_error("vllm_ascend_C's advance_step_flashattn is not emulated");
}

}  // namespace vllm_ascend

// CANN's library of platforms, as far as the module asks it: how many vector cores a kernel may be spread over.
namespace fe {

class PlatFormInfos {
 public:
  uint32_t GetCoreNumByType(const std::string& type);
};

class PlatformInfoManager {
 public:
  static PlatformInfoManager& GeInstance();
  uint32_t GetRuntimePlatformInfosByDevice(const uint32_t& device, PlatFormInfos& infos);
};

CANN_SHOWN uint32_t PlatFormInfos::GetCoreNumByType(const std::string&) { return 1; }
CANN_SHOWN PlatformInfoManager& PlatformInfoManager::GeInstance() {
  static PlatformInfoManager one;
  return one;
}
CANN_SHOWN uint32_t PlatformInfoManager::GetRuntimePlatformInfosByDevice(const uint32_t&, PlatFormInfos&) { return 0; }

}  // namespace fe

#if NPU_EMULATOR_CANN_9
// Further symbols that vllm_ascend_C of 0.23 needs: kernels that no model of the stack reaches, and the platform whose
// cores determine their tiling. Each is rejected by name. Strings in these names are those of the older C++ interface.
#define REFUSED_KERNEL(NUMBER, NAME, SYMBOL)                                                                    \
  extern "C" CANN_SHOWN void refused_kernel_##NUMBER() asm(SYMBOL);                                             \
  void refused_kernel_##NUMBER() { throw std::runtime_error("vllm_ascend_C's " NAME " is not emulated"); }
REFUSED_KERNEL(0, "bgmv_shrink",
               "_ZN11vllm_ascend16bgmv_shrink_implENS_10AscendTypeEPvS1_S1_S1_jS1_jjjjf")
REFUSED_KERNEL(1, "bgmv_expand",
               "_ZN11vllm_ascend16bgmv_expand_implENS_10AscendTypeEPvS1_S1_S1_jS1_S1_jjjjjj")
REFUSED_KERNEL(2, "sgmv_shrink",
               "_ZN11vllm_ascend16sgmv_shrink_implENS_10AscendTypeEPvS1_S1_S1_jS1_jS1_jjjjf")
REFUSED_KERNEL(3, "sgmv_expand",
               "_ZN11vllm_ascend16sgmv_expand_implENS_10AscendTypeEPvS1_S1_S1_jS1_jS1_S1_jjjjjj")
REFUSED_KERNEL(4, "mla_preprocess",
               "_ZN11vllm_ascend19mla_preprocess_implEPvS0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0"
               "_S0_S0_S0_S0_S0_S0_S0_S0_S0_j")
REFUSED_KERNEL(5, "batch_matmul_transpose", "_ZN11vllm_ascend27batch_matmul_transpose_implEPvS0_S0_S0_S0_j")
REFUSED_KERNEL(6, "platform (GetLocalMemBw)", "_ZN2fe13PlatFormInfos13GetLocalMemBwERKNS_12LocalMemTypeERm")
REFUSED_KERNEL(7, "platform (GetLocalMemSize)", "_ZN2fe13PlatFormInfos15GetLocalMemSizeERKNS_12LocalMemTypeERm")
REFUSED_KERNEL(8, "platform (SetCoreNumByCoreType)", "_ZN2fe13PlatFormInfos20SetCoreNumByCoreTypeERKSs")
REFUSED_KERNEL(9, "platform (GetPlatformResWithLock)",
               "_ZN2fe13PlatFormInfos22GetPlatformResWithLockERKSsS2_RSs")
REFUSED_KERNEL(10, "platform (InitRuntimePlatformInfos)",
               "_ZN2fe19PlatformInfoManager24InitRuntimePlatformInfosERKSs")
REFUSED_KERNEL(11, "platform (GetRuntimePlatformInfosByDevice)",
               "_ZN2fe19PlatformInfoManager31GetRuntimePlatformInfosByDeviceERKjRNS_13PlatFormInfosEb")
REFUSED_KERNEL(12, "platform (Instance)", "_ZN2fe19PlatformInfoManager8InstanceEv")
REFUSED_KERNEL(13, "platform (GetCoreNum)", "_ZNK2fe13PlatFormInfos10GetCoreNumEv")

// Whether CANN writes a message of this module and level to its log: it has none here.
CANN_API int32_t CheckLogLevel(int32_t, int32_t) { return 0; }
#endif
