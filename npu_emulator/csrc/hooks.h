#pragma once

namespace npu {

// Tells torch how to reach generators, pinned memory and the current device. Once per process.
void register_hooks();

}  // namespace npu
