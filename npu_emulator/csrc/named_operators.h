// The operators of CANN's older interface, by their names in it.
#pragma once
#include <map>
#include <string>

#include "operators.h"

namespace cann {

struct NamedCall {
  Tensors in, out;
  std::map<std::string, double> attributes;
  std::map<std::string, Ints> lists;
  std::map<std::string, std::string> words;
};
struct NamedOperator {
  const char* name;
  void (*run)(const NamedCall&);
};

// One whose results have sizes that depend on values. A result that is not asked for is undefined.
struct SizedOperator {
  const char* name;
  Tensors (*run)(const NamedCall&);
};

// Null where the operator is not emulated.
const NamedOperator* named_operator(const std::string& name);
const SizedOperator* sized_operator(const std::string& name);

}  // namespace cann
