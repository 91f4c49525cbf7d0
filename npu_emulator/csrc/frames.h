// The physical memory of a die that this process has, as CANN hands it out: frames of 2 MiB.
//
// A huge page is a frame. Normal pages of 4 KiB come from frames that are cut into them; such a frame is whole again when
// none of its pages is used, so that a small block that stays keeps 2 MiB from large ones. Which of the two a block gets
// says its policy ("aclrtMemMallocPolicy", CANN's API reference).
#pragma once
#include <acl/acl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace cann {

constexpr size_t kFrameBytes = size_t{2} << 20;
constexpr size_t kNormalPageBytes = 4096;

// The memory of a block: whole frames, and pages of cut ones (frame, pages).
struct Pages {
  int64_t frames = 0;
  std::vector<std::pair<size_t, int>> cut;
};

class Frames {
 public:
  // `take` gets so many frames from the die, or none and false; `give_back` returns them.
  Frames(std::function<bool(int64_t)> take, std::function<void(int64_t)> give_back);

  // Memory for a block of at least one byte; none where the die has too little of the kind that `policy` wants.
  std::optional<Pages> take(size_t bytes, aclrtMemMallocPolicy policy);
  void give_back(const Pages& pages);

 private:
  std::optional<Pages> cut(size_t bytes);

  const std::function<bool(int64_t)> take_;
  const std::function<void(int64_t)> give_back_;
  std::mutex mutex_;
  std::vector<int> used_;  // pages of each cut frame; 0 for one that is none any more
};

}  // namespace cann
