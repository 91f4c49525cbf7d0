// Refuses arguments that an operator's own document forbids, with the codes and in the words of CANN's argument checks,
// where NPU_EMULATOR_STRICT asks for it.
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string_view>

#include "operators.h"

namespace cann {
namespace {

constexpr int kDtypes = 64, kRanks = 32, kParameters = 64;

const char* dtype_name(int dtype) {
  switch (dtype) {
#define CANN_DTYPE(NAME, WORD) \
  case ACL_##NAME: return "DT_" WORD;
    CANN_DTYPE(FLOAT, "FLOAT") CANN_DTYPE(FLOAT16, "FLOAT16") CANN_DTYPE(BF16, "BFLOAT16")
    CANN_DTYPE(DOUBLE, "DOUBLE") CANN_DTYPE(BOOL, "BOOL") CANN_DTYPE(STRING, "STRING")
    CANN_DTYPE(INT4, "INT4") CANN_DTYPE(INT8, "INT8") CANN_DTYPE(INT16, "INT16")
    CANN_DTYPE(INT32, "INT32") CANN_DTYPE(INT64, "INT64") CANN_DTYPE(UINT8, "UINT8")
    CANN_DTYPE(UINT16, "UINT16") CANN_DTYPE(UINT32, "UINT32") CANN_DTYPE(UINT64, "UINT64")
    CANN_DTYPE(COMPLEX32, "COMPLEX32") CANN_DTYPE(COMPLEX64, "COMPLEX64") CANN_DTYPE(COMPLEX128, "COMPLEX128")
#undef CANN_DTYPE
  }
  return nullptr;
}

bool is_in(uint64_t bits, int at, int count) { return at >= 0 && at < count && bits >> at & 1; }

bool is_of_16_bits(uint64_t dtypes) { return is_in(dtypes, ACL_FLOAT16, kDtypes) || is_in(dtypes, ACL_BF16, kDtypes); }

// op-plugin passes an empty vector for what an operator does not use.
bool is_left_out(const aclTensor* given) { return !given || (given->dims.size() == 1 && given->dims[0] == 0); }

void demand_dtype(const Demand& demand, int dtype, bool in_float32) {
  if (!demand.dtypes || is_in(demand.dtypes, dtype, kDtypes)) return;
  if (in_float32 && dtype == ACL_FLOAT && is_of_16_bits(demand.dtypes)) return;
  std::ostringstream words;
  const char* given = dtype_name(dtype);
  words << "AclNN_Parameter_Error(EZ1001): Tensor " << demand.name << " not implemented for "
        << (given ? given : "DT_UNDEFINED") << ", should be in dtype support list [";
  for (int each = 0; each < kDtypes; ++each)
    if (is_in(demand.dtypes, each, kDtypes)) words << dtype_name(each) << ",";
  words << "].";
  throw Refused(kInvalidArgument, words.str());
}

void demand_rank(const Demand& demand, const aclTensor& given) {
  const int rank = given.dims.size();
  if (!demand.ranks || is_in(demand.ranks, rank, kRanks)) return;
  std::ostringstream words;
  words << "AclNN_Parameter_Error(EZ1001): Expected";
  const char* between = " ";
  for (int each = 0; each < kRanks; ++each)
    if (is_in(demand.ranks, each, kRanks)) {
      words << between << each;
      between = " or ";
    }
  words << " dimension input, but got " << demand.name << " with sizes " << c10::IntArrayRef(given.dims) << ".";
  throw Refused(kInvalidArgument, words.str());
}

void demand_order(const Demand& demand, const aclTensor& given) {
  if (!demand.contiguous) return;
  int64_t expected = 1;
  for (int at = static_cast<int>(given.dims.size()) - 1; at >= 0; --at) {
    if (given.dims[at] == 0) return;
    if (given.dims[at] != 1 && given.strides[at] != expected)
      throw Refused(kInvalidArgument, std::string("AclNN_Parameter_Error(EZ1001): Tensor ") + demand.name +
                                          " must be contiguous: its document takes no other.");
    expected *= given.dims[at];
  }
}

void demand_given(const Demand& demand, const char* kind, const void* given) {
  if (demand.required && !given)
    throw Refused(kNullPointer, std::string("AclNN_Parameter_Error(EZ1001): Expected a proper ") + kind +
                                    " but got null for argument " + demand.name + ".");
}

// Calls `each` for the parts of "a,b" until it returns true; whether it did.
template <class Each>
bool any_part(std::string_view text, Each each) {
  while (true) {
    const auto end = text.find(',');
    if (each(text.substr(0, end))) return true;
    if (end == text.npos) return false;
    text.remove_prefix(end + 1);
  }
}

// A whole number, or `absent` where the text is empty.
int64_t number(std::string_view text, int64_t absent) {
  std::from_chars(text.data(), text.data() + text.size(), absent);
  return absent;
}

bool allows(std::string_view values, int64_t given) {
  const auto between = values.find("..");
  if (between == values.npos)
    return any_part(values, [&](std::string_view each) { return number(each, ~given) == given; });
  return given >= number(values.substr(0, between), INT64_MIN) && given <= number(values.substr(between + 2), INT64_MAX);
}

template <class Given>
[[noreturn]] void refuse_value(const Demand& demand, Given given) {
  std::ostringstream words;
  words << "AclNN_Parameter_Error(EZ1001): " << demand.name << " must be " << demand.values << ", but got " << given
        << ".";
  throw Refused(kInvalidArgument, words.str());
}

bool broadcasts(c10::IntArrayRef ours, c10::IntArrayRef theirs) {
  for (size_t back = 1; back <= std::min(ours.size(), theirs.size()); ++back) {
    const auto own = ours[ours.size() - back], other = theirs[theirs.size() - back];
    if (own != other && own != 1 && other != 1) return false;
  }
  return true;
}

void demand_agreement(const Demand& demand, const aclTensor& given, Agreement agreement, const Demand& of_other,
                      const aclTensor& other) {
  const c10::IntArrayRef ours(given.dims), theirs(other.dims);
  const bool agree = agreement == Agreement::kDtype   ? given.dtype == other.dtype
                     : agreement == Agreement::kShape ? ours == theirs
                                                      : broadcasts(ours, theirs);
  if (agree) return;
  std::ostringstream words;
  words << "AclNN_Parameter_Error(EZ1001): ";
  if (agreement == Agreement::kDtype) {
    const char *own = dtype_name(given.dtype), *expected = dtype_name(other.dtype);
    words << "Expected both tensors to have same dtype, but found " << demand.name << " "
          << (own ? own : "DT_UNDEFINED") << " and " << of_other.name << " " << (expected ? expected : "DT_UNDEFINED");
  } else if (agreement == Agreement::kShape) {
    words << "Expected tensor for " << demand.name << " to have same size as tensor for " << of_other.name << ", but "
          << ours << " does not equal " << theirs;
  } else {
    words << "The size of tensor " << demand.name << " " << ours << " must match the size of tensor " << of_other.name
          << " " << theirs;
  }
  throw Refused(kInvalidArgument, words.str() + ".");
}

void demand_broadcast(const Demand& demand, const aclTensor& given, const std::vector<const aclTensor*>& others) {
  Ints result;
  for (const auto* other : others) {
    if (is_left_out(other)) return;
    if (!broadcasts(result, other->dims)) return;  // which the relations of the others say better
    result = at::infer_size(result, other->dims);
  }
  if (given.dims == result) return;
  std::ostringstream words;
  words << "AclNN_Parameter_Error(EZ1001): Expected tensor for " << demand.name << " to have same size as "
        << c10::IntArrayRef(result) << ", but got " << c10::IntArrayRef(given.dims) << ".";
  throw Refused(kInvalidArgument, words.str());
}

struct Document {
  std::string_view name, chip;  // chip: the only family that has the operator, A2 or A3; empty if both have
  const Demand* demands;
  size_t parameters;
};

// kRelations, kDemands, and kDocuments in the order of their names.
#include "documented.inc"

// The document of "aclnnX"; null where there is none.
const Document* document_of(std::string_view name) {
  const auto* found = std::lower_bound(std::begin(kDocuments), std::end(kDocuments), name,
                                       [](const Document& each, std::string_view other) { return each.name < other; });
  return found != std::end(kDocuments) && found->name == name ? found : nullptr;
}

std::string_view mode() {
  const char* text = std::getenv("NPU_EMULATOR_STRICT");
  return text ? text : "";
}

// The demands on an operator's parameters in their order; null where there is no document, or one of other parameters.
const Demand* demands_on(const char* operator_name, size_t parameters) {
  const auto* found = document_of(operator_name);
  return found && found->parameters == parameters ? found->demands : nullptr;
}

// Whether this chip has an operator, as far as its document and its sources say.
bool has_kernel(const char* operator_name) {
  const auto* found = document_of(operator_name);
  if (!found || found->chip.empty()) return true;
  const std::string_view name = aclrtGetSocName();
  return found->chip == (name.substr(0, 11) == "Ascend910_9" ? "A3" : "A2");
}

[[noreturn]] void refuse_kernel(const char* operator_name) {
  const std::string name = operator_name + std::string_view("aclnn").size();
  throw Refused(kNoKernel, "Op " + name + " does not has any binary. Of its document and sources only Atlas " +
                               std::string(document_of(operator_name)->chip) + " has it, and this is " +
                               aclrtGetSocName() + ".");
}

bool is_of_float32(const aclTensor* given) {
  return !given || (given->dtype != ACL_FLOAT16 && given->dtype != ACL_BF16 && given->dtype != ACL_DOUBLE);
}

using GivenTensors = std::vector<const aclTensor*>;

// The tensors of an argument: one, those of a list, or none.
GivenTensors tensors_of(const Argument& given) {
  if (given.kind == Argument::Kind::kTensor) return {given.tensor};
  return given.kind == Argument::Kind::kTensorList && given.tensors ? given.tensors->values : GivenTensors();
}

// Whether all tensors of a call are of float32, as far as they hold floating-point numbers.
bool are_of_float32(std::initializer_list<Argument> given) {
  return std::all_of(given.begin(), given.end(), [](const Argument& argument) {
    const auto tensors = tensors_of(argument);
    return std::all_of(tensors.begin(), tensors.end(), is_of_float32);
  });
}

void demand_tensor(const Demand& demand, const aclTensor* given, bool in_float32) {
  demand_given(demand, "Tensor", given);
  if (!given) return;
  demand_dtype(demand, given->dtype, in_float32);
  demand_rank(demand, *given);
  demand_order(demand, *given);
}

void demand_list(const Demand& demand, const aclTensorList* given, bool in_float32) {
  demand_given(demand, "TensorList", given);
  if (!given) return;
  Demand of_each = demand;
  of_each.required = false;
  for (const auto* each : given->values)
    if (!is_left_out(each)) demand_tensor(of_each, each, in_float32);
}

void demand_text(const Demand& demand, const char* given) {
  if (!given || !*given || !*demand.values) return;
  if (!any_part(demand.values, [&](std::string_view each) { return each == given; })) refuse_value(demand, given);
}

void demand_argument(const Demand& demand, const Argument& given, bool in_float32) {
  switch (given.kind) {
    case Argument::Kind::kTensor: return demand_tensor(demand, given.tensor, in_float32);
    case Argument::Kind::kTensorList: return demand_list(demand, given.tensors, in_float32);
    case Argument::Kind::kText: return demand_text(demand, given.text);
    case Argument::Kind::kNumber:
      if (*demand.values && !allows(demand.values, given.number)) refuse_value(demand, given.number);
      return;
    case Argument::Kind::kOther: return;
  }
}

void demand_relations(const Demand* demands, const std::vector<GivenTensors>& given) {
  for (size_t at = 0; at < given.size(); ++at)
    for (int number = 0; number < demands[at].related; ++number)
      for (size_t index = 0; index < given[at].size(); ++index) {
        const auto& relation = demands[at].relations[number];
        if (is_left_out(given[at][index])) continue;
        std::vector<const aclTensor*> others;
        for (size_t other = 0; other < given.size(); ++other) {
          if (!is_in(relation.others, other, kParameters) || given[other].size() != given[at].size()) continue;
          others.push_back(given[other][index]);
          if (relation.agreement != Agreement::kBroadcastOf && !is_left_out(others.back()))
            demand_agreement(demands[at], *given[at][index], relation.agreement, demands[other], *others.back());
        }
        if (relation.agreement == Agreement::kBroadcastOf) demand_broadcast(demands[at], *given[at][index], others);
      }
}

}  // namespace

bool is_strict() { return !mode().empty() && mode() != "0"; }

bool reference_runs() { return mode() == "float32"; }

void demand_that(bool holds, const char* parameter, const char* words) {
  TORCH_CHECK(holds || !is_strict(), "AclNN_Parameter_Error(EZ1001): ", parameter, " ", words, ".");
}

void demand_value(bool holds, const char* parameter, const std::string& words, int64_t given) {
  TORCH_CHECK(holds || !is_strict(), "AclNN_Parameter_Error(EZ1001): ", parameter, " must be ", words, ", but got ",
              given, ".");
}

void demand_type_of(const Tensor& other, const char* other_parameter, const Tensor& given, const char* parameter) {
  if (!given.defined() || !given.numel() || given.scalar_type() == other.scalar_type() || !is_strict()) return;
  TORCH_CHECK(false, "AclNN_Parameter_Error(EZ1001): Tensor ", parameter, " must have the dtype of ", other_parameter,
              ", ", other.scalar_type(), ", and has ", given.scalar_type(), ".");
}

void demand_16_bits(const Tensor& given, const char* parameter) {
  const bool holds = at::isReducedFloatingType(given.scalar_type()) ||
                     (reference_runs() && given.scalar_type() == at::kFloat);
  demand_that(holds, parameter, "must be float16 or bfloat16");
}

void demand_int32(const Tensor& given, const char* parameter) {
  demand_that(!given.defined() || given.scalar_type() == at::kInt, parameter, "must be int32");
}

void check_call(Operator& called, std::initializer_list<Argument> given) {
  if (!is_strict()) return;
  std::call_once(called.looked_up, [&] {
    const auto has_some = [](const Demand& demand) { return demand.related > 0; };
    called.demands = demands_on(called.name, given.size());
    called.has_relations = called.demands && std::any_of(called.demands, called.demands + given.size(), has_some);
    called.is_on_this_chip = has_kernel(called.name);
  });
  if (!called.is_on_this_chip) refuse_kernel(called.name);
  const Demand* next = called.demands;
  if (!next) return;
  // A reference run may give float32 where kernels demand 16 bits, if all tensors of the call are of float32.
  const bool in_float32 = reference_runs() && are_of_float32(given);
  for (const auto& argument : given) demand_argument(*next++, argument, in_float32);
  if (!called.has_relations) return;
  std::vector<GivenTensors> tensors;
  for (const auto& argument : given) tensors.push_back(tensors_of(argument));
  demand_relations(called.demands, tensors);
}

}  // namespace cann
