// The graph engine (GE) stays out. libtorch_npu.so registers operators with it while it is loaded, and torchair's
// libraries are linked with it, which is accepted; building a graph is refused.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include <graph/operator.h>
#include <graph/operator_factory.h>

#define CANN_SHOWN __attribute__((visibility("default")))

namespace ge {
namespace {

[[noreturn]] void refuse(const char* function) {
  throw std::runtime_error(std::string(function) + ": the graph engine of CANN is not emulated");
}

}  // namespace

CANN_SHOWN AscendString::AscendString(const char*) {}
CANN_SHOWN OperatorCreatorRegister::OperatorCreatorRegister(const char*, OpCreatorV2 const&) {}
CANN_SHOWN Operator::Operator(const char*, const char*) { refuse("ge::Operator"); }
CANN_SHOWN Operator::Operator(const AscendString&, const AscendString&) { refuse("ge::Operator"); }
CANN_SHOWN void Operator::AttrRegister(const char*, bool) { refuse("ge::Operator::AttrRegister"); }
CANN_SHOWN void Operator::AttrRegister(const char*, int64_t) { refuse("ge::Operator::AttrRegister"); }
CANN_SHOWN void Operator::InputRegister(const char*) { refuse("ge::Operator::InputRegister"); }
CANN_SHOWN void Operator::OutputRegister(const char*) { refuse("ge::Operator::OutputRegister"); }
CANN_SHOWN void Operator::RequiredAttrRegister(const char*) { refuse("ge::Operator::RequiredAttrRegister"); }
CANN_SHOWN void Operator::DynamicInputRegister(const char*, const unsigned int, bool) {
  refuse("ge::Operator::DynamicInputRegister");
}
CANN_SHOWN void Operator::DynamicInputRegisterByIndex(const char*, const unsigned int, size_t) {
  refuse("ge::Operator::DynamicInputRegisterByIndex");
}

}  // namespace ge

#define REFUSED_SYMBOL(NUMBER, SYMBOL)                                                         \
  extern "C" __attribute__((visibility("default"), weak)) void refused_##NUMBER() asm(SYMBOL); \
  void refused_##NUMBER() { ge::refuse(SYMBOL); }
#include "refused_graph_engine.inc"

// Two functions of CANN's library of checked C functions.
extern "C" CANN_SHOWN int strcpy_s(char* to, size_t room, const char* from) {
  if (std::strlen(from) >= room) return 1;
  std::strcpy(to, from);
  return 0;
}
extern "C" CANN_SHOWN int vsnprintf_s(char* to, size_t room, size_t count, const char* format, va_list arguments) {
  return std::vsnprintf(to, std::min(room, count + 1), format, arguments);
}
