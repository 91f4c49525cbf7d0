// CANN's public headers, as the torch_npu at hand brings them, and names for what differs from release to release: those of
// CANN 8.2, with torch_npu 2.5.1, and those of CANN 9, with torch_npu of 2026.
#pragma once
#include <acl/acl.h>
#include <acl/acl_prof.h>
#include <hccl/hccl.h>

#if __has_include(<acl/acl_base_rt.h>)
#define NPU_EMULATOR_CANN_9 1
namespace cann {
using GivenEvents = const aclprofAicoreEvents;
using GivenData = void;
}  // namespace cann
#else
#define NPU_EMULATOR_CANN_9 0
#include <acl/acl_msprof.h>
using aclrtMemGranularityOptions = int;  // these headers lack it
namespace cann {
using GivenEvents = aclprofAicoreEvents;
using GivenData = const void;
}  // namespace cann
#endif
