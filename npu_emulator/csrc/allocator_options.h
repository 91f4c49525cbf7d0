// PYTORCH_NPU_ALLOC_CONF: options of the caching allocator. None changes anything here, where memory never fragments.
#pragma once
#include <string>

namespace npu {

// Throws for a text that the allocator of torch_npu refuses: an option that it does not know, a value out of range,
// or expandable segments together with an option of the other kind of segments.
void check_allocator_options(const std::string& text);

}  // namespace npu
