// A node: the processes that share dies. Each sees what the others have taken of a die's memory.
//
// A file in /dev/shm says which process holds how many bytes of which die. Its name is made of the user and
// NPU_EMULATOR_NODE ("default" unless set). A process that is killed returns its share when somebody needs it.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <vector>

namespace npu::node {

struct Holder {
  pid_t process;
  int64_t bytes;
};

// Takes `bytes` more of a die of the machine for this process. False, and nothing taken, if with the living processes'
// shares that is more than `capacity`.
bool reserve(int die, int64_t bytes, int64_t capacity);
void release(int die, int64_t bytes) noexcept;

// The living processes that hold memory of a die, this one included.
std::vector<Holder> holders(int die);

// At the end of a process: returns its share, and removes every file that no living process uses.
void leave() noexcept;

}  // namespace npu::node
