// The part of ATB's C++ interface that libop_plugin_atb.so is linked against, and that extensions such as MindSpeed's
// are compiled against: the layouts and the virtual functions of its classes, as its documentation gives them. A test
// holds their sizes. The toolkit has it under the names of ATB's own headers.
#pragma once
#include <acl/acl.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace atb {

using Status = int32_t;

struct Dims {
  int64_t dims[8];
  uint64_t dimNum = 0;
};
struct TensorDesc {
  aclDataType dtype = ACL_DT_UNDEFINED;
  aclFormat format = ACL_FORMAT_UNDEFINED;
  Dims shape;
};
struct Tensor {
  TensorDesc desc;
  void* deviceData = nullptr;
  void* hostData = nullptr;
  uint64_t dataSize = 0;
};

// A vector of at most 64 elements in place, or of more on the heap, which is only read here.
template <class T>
class SVector {
 public:
  void push_back(const T& element) {
    if (size_ == kInPlace) throw std::length_error("more than 64 tensors of an operation of ATB");
    storage_[size_++] = element;
  }
  size_t size() const { return size_; }
  const T* begin() const { return heap_ ? heap_ : storage_; }
  const T* end() const { return begin() + size_; }

 private:
  static constexpr size_t kInPlace = 64;
  size_t capacity_ = kInPlace;
  size_t size_ = 0;
  T storage_[kInPlace + 1];
  T* heap_ = nullptr;
};
struct VariantPack {
  SVector<Tensor> inTensors;
  SVector<Tensor> outTensors;
};

class Context {
 public:
  virtual ~Context() = default;
  virtual Status SetExecuteStream(aclrtStream stream) = 0;
  virtual aclrtStream GetExecuteStream() const = 0;
  virtual Status SetAsyncTilingCopyStatus(bool enable) = 0;
  virtual bool GetAsyncTilingCopyStatus() const = 0;
};
class Operation {
 public:
  virtual ~Operation() = default;
  virtual std::string GetName() const = 0;
  virtual Status InferShape(const SVector<TensorDesc>& in, SVector<TensorDesc>& out) const = 0;
  virtual uint32_t GetInputNum() const = 0;
  virtual uint32_t GetOutputNum() const = 0;
  virtual Status Setup(const VariantPack& pack, uint64_t& workspace_bytes, Context* context) = 0;
  virtual Status Execute(const VariantPack& pack, uint8_t* workspace, uint64_t workspace_bytes, Context* context) = 0;
};

class Utils {
 public:
  static uint64_t GetTensorSize(const Tensor& tensor);
};

template <class Parameters>
Status CreateOperation(const Parameters& parameters, Operation** operation);
Status DestroyOperation(Operation* operation);
Status CreateContext(Context** context);
Status DestroyContext(Context* context);

namespace infer {

struct ReshapeAndCacheParam {
  int32_t compressType = 0, kvCacheCfg = 0;
  uint8_t reserved[16] = {};
};
struct RopeParam {
  int32_t rotaryCoeff = 4, cosFormat = 0;
  uint8_t reserved[8] = {};
};
struct PagedAttentionParam {
  enum MaskType : int { kNoMask = 0, kNormMask, kAlibiMask, kSpecMask };
  int32_t headNum = 0;
  float qkScale = 1;
  int32_t kvHeadNum = 0;
  MaskType maskType = kNoMask;
  bool batchRunStatusEnable = false;
  int32_t quantType = 0;
  aclDataType outDataType = ACL_DT_UNDEFINED;
  bool hasQuantOffset = false;
  int32_t compressType = 0, calcType = 0, scaleType = 0, inputLayout = 0;
  uint32_t mlaVHeadSize = 0;
  uint8_t reserved[68] = {};
};
struct SelfAttentionParam {
  enum CalcType : int { kBoth = 0, kEncoder, kDecoder, kPagedEncoder, kPrefixEncoder };
  enum MaskType : int { kNoMask = 0, kNormMask, kAlibiMask, kCompressedNormMask };
  int32_t quantType = 0;
  aclDataType outDataType = ACL_DT_UNDEFINED;
  int32_t headNum = 0, kvHeadNum = 0;
  float qScale = 1, qkScale = 1;
  bool batchRunStatusEnable = false;
  uint32_t isTriuMask = 0;
  CalcType calcType = kBoth;
  int32_t kernelType = 0, clampType = 0;
  float clampMin = 0, clampMax = 0;
  MaskType maskType = kNoMask;
  int32_t kvcacheCfg = 0, scaleType = 0, inputLayout = 0;
  uint32_t mlaVHeadSize = 0;
  int8_t cacheType = 0;
  uint32_t windowSize = 0;
  uint8_t reserved[64] = {};
};
struct LinearParam {
  bool transposeA = false, transposeB = true, hasBias = true;
  aclDataType outDataType = ACL_DT_UNDEFINED;
  bool enAccum = false;
  uint8_t reserved[23] = {};
};
struct GroupedMatmulInplaceAddParam {
  bool transposeA = false, transposeB = false;
  uint8_t reserved[30] = {};
};
enum CommMode : int { COMM_UNDEFINED = -1, COMM_MULTI_PROCESS, COMM_MULTI_THREAD };
// A product of matrices with a collective inside. Compiled against, and refused when it is made.
struct LinearParallelParam {
  enum ParallelType : int {
    UNDEFINED = -1,
    LINEAR_ALL_REDUCE,
    LINEAR_REDUCE_SCATTER,
    ALL_GATHER_LINEAR,
    PURE_LINEAR,
    ALL_GATHER_LINEAR_REDUCE_SCATTER,
  };
  struct TwoDimTPInfo {
    uint16_t agDim = 0, rsDim = 0;
    uint8_t innerDimIsAg = 1;
  };
  bool transWeight = true;
  int rank = 0, rankSize = 0, rankRoot = 0;
  bool hasResidual = false;
  std::string backend, commDomain;
  CommMode commMode = COMM_MULTI_PROCESS;
  ParallelType type = LINEAR_ALL_REDUCE;
  bool keepIntermediate = false;
  TwoDimTPInfo twoDimTPInfo;
};
struct ElewiseParam;
struct RmsNormParam;
struct GroupTopkParam;

}  // namespace infer
}  // namespace atb
