// Blocks of device memory that other processes of the machine may map (aclrtIpcMem...). A process keeps its blocks in one
// file without a name, so that nothing is left of a killed process.
#pragma once
#include <cstddef>

namespace cann {

// A block of at least `bytes` bytes; null for small blocks, which torch_npu does not share, and before CANN 9.
void* allocate_in_file(size_t bytes);
// Whether a block began at `address`; it is given back.
bool free_in_file(void* address);
// Whether an address lies in a block of another process that this one has imported: charged to the process that made it.
bool is_imported(const void* address);

}  // namespace cann
