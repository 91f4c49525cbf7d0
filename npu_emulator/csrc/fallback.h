// Every operator that has no kernel of its own on the NPU: its CPU kernel, run on aliases of the same memory.
#pragma once

namespace npu {

// Makes the fallback serve operators that would otherwise inherit a kernel made of several. Once per process.
void route_inherited_operators();

}  // namespace npu
