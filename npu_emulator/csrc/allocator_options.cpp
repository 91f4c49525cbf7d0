#include "allocator_options.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <map>
#include <sstream>

namespace npu {
namespace {

std::string without_spaces(std::string text) {
  std::string kept;
  for (const char each : text)
    if (each != ' ') kept += each;
  return kept;
}

double number(const std::string& name, const std::string& value) {
  char* end = nullptr;
  const double read = std::strtod(value.c_str(), &end);
  TORCH_CHECK(!value.empty() && !*end, "CachingAllocator option ", name, " must be a number, not '", value, "'");
  return read;
}

}  // namespace

void check_allocator_options(const std::string& text) {
  std::map<std::string, std::string> options;
  std::istringstream entries(without_spaces(text));
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto colon = entry.find(':');
    TORCH_CHECK(colon != std::string::npos, "CachingAllocator option '", entry, "' must be NAME:VALUE");
    options[entry.substr(0, colon)] = entry.substr(colon + 1);
  }
  for (const auto& [name, value] : options) {
    if (name == "expandable_segments") {
      TORCH_CHECK(value == "True" || value == "False", "Expected a single True/False argument for ", name);
    } else if (name == "max_split_size_mb") {
      TORCH_CHECK(number(name, value) > 20, "CachingAllocator option ", name, " too small, must be > 20");
    } else if (name == "garbage_collection_threshold") {
      const auto threshold = number(name, value);
      TORCH_CHECK(threshold > 0 && threshold < 1, name, " must be between 0 and 1, not ", value);
    } else {
      TORCH_CHECK(name == "base_addr_aligned_kb" || name == "page_size", "Unrecognized CachingAllocator option: ",
                  name);
    }
  }
  const auto expandable = options.find("expandable_segments");
  TORCH_CHECK(expandable == options.end() || expandable->second != "True" ||
                  (!options.count("max_split_size_mb") && !options.count("garbage_collection_threshold")),
              "max_split_size_mb and garbage_collection_threshold cannot be set with expandable_segments:True");
}

}  // namespace npu
