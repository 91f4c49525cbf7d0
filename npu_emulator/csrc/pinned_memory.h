// Page-locked host memory: ordinary host memory that is remembered as pinned.
#pragma once
#include <c10/core/Allocator.h>

namespace npu {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

}  // namespace npu
