// What operators of CANN's older interface do, by their names in it.
#pragma once
#include <map>
#include <string>

#include "operators.h"

namespace cann {

struct NamedCall {
  Tensors in, out;
  std::map<std::string, double> attributes;
  std::map<std::string, Ints> lists;
};
struct NamedOperator {
  const char* name;
  void (*run)(const NamedCall&);
};

// Null where the operator is not emulated.
const NamedOperator* named_operator(const std::string& name);

}  // namespace cann
