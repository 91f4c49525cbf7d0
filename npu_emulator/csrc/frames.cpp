#include "frames.h"

#include <algorithm>

namespace cann {
namespace {

constexpr int kPagesOfAFrame = static_cast<int>(kFrameBytes / kNormalPageBytes);
// Up to this size ACL_MEM_MALLOC_HUGE_FIRST takes normal pages.
constexpr size_t kLargestSmallBlock = size_t{1} << 20;

enum class Kind { kHuge, kHugeOrNormal, kNormal };

// Bits for the kind of memory and for access do not change the kind of page.
Kind kind_of(aclrtMemMallocPolicy policy, size_t bytes) {
  constexpr int kPageBits = 0xff;
  switch (static_cast<int>(policy) & kPageBits) {
    case ACL_MEM_MALLOC_NORMAL_ONLY:
    case ACL_MEM_MALLOC_NORMAL_ONLY_P2P:
      return Kind::kNormal;
    case ACL_MEM_MALLOC_HUGE_FIRST:
    case ACL_MEM_MALLOC_HUGE_FIRST_P2P:
      return bytes <= kLargestSmallBlock ? Kind::kNormal : Kind::kHugeOrNormal;
    default:
      return Kind::kHuge;
  }
}

}  // namespace

Frames::Frames(std::function<bool(int64_t)> take, std::function<void(int64_t)> give_back)
    : take_(std::move(take)), give_back_(std::move(give_back)) {}

std::optional<Pages> Frames::take(size_t bytes, aclrtMemMallocPolicy policy) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto kind = kind_of(policy, bytes);
  if (kind == Kind::kNormal) return cut(bytes);
  const auto frames = static_cast<int64_t>((bytes + kFrameBytes - 1) / kFrameBytes);
  if (take_(frames)) return Pages{frames, {}};
  return kind == Kind::kHugeOrNormal ? cut(bytes) : std::nullopt;
}

void Frames::give_back(const Pages& pages) {
  std::lock_guard<std::mutex> guard(mutex_);
  int64_t whole = pages.frames;
  for (const auto& [frame, count] : pages.cut) whole += (used_[frame] -= count) == 0;
  if (whole) give_back_(whole);
}

// Fills frames that are cut already, and cuts more for the rest: 700 pages, where one frame has 100 left, take those, a
// frame, and 88 of another.
std::optional<Pages> Frames::cut(size_t bytes) {
  auto missing = static_cast<int64_t>((bytes + kNormalPageBytes - 1) / kNormalPageBytes);
  std::vector<std::pair<size_t, int>> found;
  const auto use = [&](size_t frame) {
    const auto pages = std::min<int64_t>(missing, kPagesOfAFrame - used_[frame]);
    if (pages > 0) found.emplace_back(frame, static_cast<int>(pages));
    missing -= pages;
  };
  for (size_t frame = 0; frame < used_.size() && missing; ++frame)
    if (used_[frame]) use(frame);
  if (missing && !take_((missing + kPagesOfAFrame - 1) / kPagesOfAFrame)) return std::nullopt;
  for (size_t frame = 0; missing; ++frame) {
    if (frame == used_.size()) used_.push_back(0);
    if (!used_[frame]) use(frame);
  }
  for (const auto& [frame, pages] : found) used_[frame] += pages;
  return Pages{0, std::move(found)};
}

}  // namespace cann
