// HCCL over groups of processes that share memory. Reductions add up in the order of ranks, in float32 for the narrower
// types, and round once.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include "device.h"
#include "headers.h"
#include "meters.h"
#include "operators.h"
#include "shared_group.h"

using namespace cann;

namespace {

// The staging buffer in which a pending collective writes.
struct Landing {
  void* out;
  std::vector<char> bytes;
};
thread_local std::vector<Landing>* landings = nullptr;

// Returns the address for `bytes` bytes that a collective writes to `out`: `out` itself, or a staging buffer.
void* landing(void* out, size_t bytes) {
  if (!landings || !bytes) return out;
  landings->push_back({out, std::vector<char>(bytes)});
  return landings->back().bytes.data();
}

// Does `work` on the stream; what it writes appears when something waits for the stream, or work there reads it.
void submit_late(aclrtStream stream, const char* name, const Spans& reads, const std::function<void()>& work) {
  auto written = std::make_shared<std::vector<Landing>>();
  submit(stream, name, [&] {
    landings = written.get();
    try {
      work();
    } catch (...) {
      landings = nullptr;
      throw;
    }
    landings = nullptr;
  }, &reads);
  Spans places;
  for (const auto& one : *written) places.push_back({one.out, one.bytes.size()});
  defer(stream, std::move(places), [written] {
    for (const auto& one : *written) std::memcpy(one.out, one.bytes.data(), one.bytes.size());
  });
}

at::ScalarType torch_type(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return at::kChar;
    case HCCL_DATA_TYPE_INT16: return at::kShort;
    case HCCL_DATA_TYPE_INT32: return at::kInt;
    case HCCL_DATA_TYPE_FP16: return at::kHalf;
    case HCCL_DATA_TYPE_FP32: return at::kFloat;
    case HCCL_DATA_TYPE_INT64: return at::kLong;
    case HCCL_DATA_TYPE_UINT64: return at::kLong;
    case HCCL_DATA_TYPE_UINT8: return at::kByte;
    case HCCL_DATA_TYPE_FP64: return at::kDouble;
    case HCCL_DATA_TYPE_BFP16: return at::kBFloat16;
    default: TORCH_CHECK(false, "HcclDataType ", static_cast<int>(type), " is not emulated");
  }
}

size_t width(HcclDataType type) { return c10::elementSize(torch_type(type)); }

SharedGroup& group(HcclComm communicator) { return *static_cast<SharedGroup*>(communicator); }

Tensor flat(const void* data, uint64_t count, HcclDataType type) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(count)},
                       at::TensorOptions().dtype(torch_type(type)));
}

// The arguments of a collective that all its ranks give alike, in words.
std::string words(uint64_t count, HcclDataType type) {
  return std::to_string(count) + " x " + at::toString(torch_type(type));
}
std::string words(uint64_t count, HcclDataType type, HcclReduceOp op) {
  static const std::map<HcclReduceOp, const char*> names{
      {HCCL_REDUCE_SUM, "sum"}, {HCCL_REDUCE_PROD, "product"}, {HCCL_REDUCE_MAX, "max"}, {HCCL_REDUCE_MIN, "min"}};
  const auto found = names.find(op);
  return words(count, type) + ", " + (found == names.end() ? std::to_string(op) : found->second);
}
// Lists of what each rank gives or gets, in the order of ranks, and of where it lies. Long ones are told apart by a
// number, since the memory in which ranks compare calls is small.
std::string words(const std::vector<uint64_t>& counts, const std::vector<uint64_t>& starts) {
  constexpr size_t kLongest = 40;
  std::string text;
  for (const auto* list : {&counts, &starts}) {
    text += list == &counts ? ", counts" : " at";
    for (const auto value : *list) text += " " + std::to_string(value);
  }
  return text.size() <= kLongest ? text : ", counts and places #" + std::to_string(std::hash<std::string>()(text));
}
// The count that a rank itself gives must be the one of the lists; the rank in it makes the calls of two ranks differ.
std::string words_for_own(int rank, uint64_t own, uint64_t listed) {
  return own == listed ? "" : ", rank " + std::to_string(rank) + " passes " + std::to_string(own);
}
std::string with_root(const std::string& words, uint32_t root) { return words + ", root " + std::to_string(root); }

// Gives a copy of `bytes` bytes.
SharedGroup::Fill copy_of(const void* data, size_t bytes) {
  return [=](char* area) { std::memcpy(area, data, bytes); };
}

// The meters' name for a function of HCCL.
const char* kind_of(const std::string& function) {
  static const std::map<std::string, const char*> kinds{
      {"HcclAllReduce", "all_reduce"}, {"HcclReduce", "reduce"}, {"HcclReduceScatter", "reduce_scatter"},
      {"HcclReduceScatterV", "reduce_scatter"}, {"HcclAllGather", "all_gather"}, {"HcclAllGatherV", "all_gather"},
      {"HcclBroadcast", "broadcast"}, {"HcclScatter", "scatter"}, {"HcclAlltoAll", "all_to_all"},
      {"HcclAlltoAllV", "all_to_all"}};
  return kinds.at(function);
}

// Does `work` of a communicator, which reads `reads`, on the stream; it counts itself.
HcclResult submit_guarded(const char* name, SharedGroup& ranks, const Spans& reads, aclrtStream stream,
                          std::function<void()> work) {
  if (!ranks.has_buffers()) {
    fail(HCCL_E_MEMORY, ranks.words_for_no_buffers());
    return HCCL_E_MEMORY;
  }
  const auto guarded = [work = std::move(work)] {
    const HostKernels guard;
    work();
  };
  try {
    if (defers_collectives() && stream && !is_capturing(stream)) submit_late(stream, name, reads, guarded);
    else submit(stream, name, guarded);
    return HCCL_SUCCESS;
  } catch (const c10::Error& error) {
    fail(HCCL_E_TIMEOUT, error.what_without_backtrace());
    return HCCL_E_TIMEOUT;
  }
}

// Does `work` on the stream and counts it: `given` is what this rank gives.
HcclResult call(const char* name, SharedGroup& ranks, Span given, aclrtStream stream, std::function<void()> work) {
  const auto counted = [kind = kind_of(name), size = ranks.ranks, bytes = given.bytes, work = std::move(work)] {
    work();
    npu::meters::count_collective(kind, size, static_cast<int64_t>(bytes));
  };
  return submit_guarded(name, ranks, {given}, stream, counted);
}

// The same of a reduction.
HcclResult call_reduction(const char* name, SharedGroup& ranks, Span given, HcclDataType type, HcclReduceOp op,
                          aclrtStream stream, std::function<void()> work) {
  // HCCL's own check for Atlas A2 and A3.
  if (op == HCCL_REDUCE_PROD && (type == HCCL_DATA_TYPE_INT16 || type == HCCL_DATA_TYPE_BFP16)) {
    fail(HCCL_E_NOT_SUPPORT, std::string(name) + ": products of int16 and bfloat16 are not supported");
    return HCCL_E_NOT_SUPPORT;
  }
  return call(name, ranks, given, stream, std::move(work));
}

// The reduction of the elements from `first` on of what all ranks gave.
void reduce(SharedGroup& ranks, void* out, uint64_t first, uint64_t count, HcclDataType type, HcclReduceOp op) {
  const auto part = [&](int rank) {
    const auto given = flat(ranks.given(rank) + first * width(type), count, type);
    return at::isFloatingType(given.scalar_type()) ? wide(given) : given;
  };
  auto total = part(0).clone();
  for (int rank = 1; rank < ranks.ranks; ++rank) {
    switch (op) {
      case HCCL_REDUCE_SUM: total.add_(part(rank)); break;
      case HCCL_REDUCE_PROD: total.mul_(part(rank)); break;
      case HCCL_REDUCE_MAX: total = at::maximum(total, part(rank)); break;
      case HCCL_REDUCE_MIN: total = at::minimum(total, part(rank)); break;
      default: TORCH_CHECK(false, "HcclReduceOp ", static_cast<int>(op), " is not emulated");
    }
  }
  flat(landing(out, count * width(type)), count, type).copy_(total);
}

std::vector<uint64_t> copied(const void* values, int count) {
  const auto* all = static_cast<const uint64_t*>(values);
  return {all, all + count};
}

uint64_t end_of(const std::vector<uint64_t>& counts, const std::vector<uint64_t>& starts) {
  uint64_t end = 0;
  for (size_t index = 0; index < counts.size(); ++index) end = std::max(end, starts[index] + counts[index]);
  return end;
}

// The size of one buffer of a communicator: of its configuration, where torch_npu puts HCCL_BUFFSIZE or, for two
// ranks that only send to each other, P2P_HCCL_BUFFSIZE; or else HCCL_BUFFSIZE, or 200 MiB (CANN's environment variables).
size_t buffer_bytes(const HcclCommConfig* config) {
  const auto mebibytes = config ? config->hcclBufferSize : npu::environment_integer("HCCL_BUFFSIZE", 200);
  return static_cast<size_t>(mebibytes) << 20;
}

HcclResult join(const HcclRootInfo* root, uint32_t ranks, uint32_t rank, const HcclCommConfig* config,
                HcclComm* communicator) {
  try {
    Meeting meeting;
    std::memcpy(&meeting, root->internal, sizeof meeting);
    *communicator = new SharedGroup(meeting, static_cast<int>(ranks), static_cast<int>(rank), buffer_bytes(config));
    return HCCL_SUCCESS;
  } catch (const c10::Error& error) {
    fail(HCCL_E_TIMEOUT, error.what_without_backtrace());
    return HCCL_E_TIMEOUT;
  }
}

struct Parts {
  std::vector<uint64_t> counts, starts;  // by rank, in elements
};

// Each rank gives, before its data, where in it the part of each rank begins and how long it is.
HcclResult all_to_all(const char* name, const void* in, Parts from, void* out, Parts to, HcclDataType type,
                      HcclComm communicator, aclrtStream stream) {
  auto& ranks = group(communicator);
  const size_t element = width(type), table = ranks.ranks * sizeof(uint64_t);
  const size_t bytes = end_of(from.counts, from.starts) * element;
  return call(name, ranks, {in, bytes}, stream, [=, &ranks, from = std::move(from), to = std::move(to)] {
    const auto fill = [&](char* area) {
      std::memcpy(area, from.starts.data(), table);
      std::memcpy(area + table, from.counts.data(), table);
      std::memcpy(area + 2 * table, in, bytes);
    };
    ranks.exchange(name, at::toString(torch_type(type)), 2 * table + bytes, fill, [&] {
      for (int rank = 0; rank < ranks.ranks; ++rank) {
        const char* area = ranks.given(rank);
        const auto* starts = reinterpret_cast<const uint64_t*>(area);
        const auto* sizes = reinterpret_cast<const uint64_t*>(area + table);
        TORCH_CHECK(sizes[ranks.rank] == to.counts[rank], name, ": rank ", rank, " sends ", sizes[ranks.rank],
                    " elements to rank ", ranks.rank, ", which expects ", to.counts[rank]);
        const size_t size = to.counts[rank] * element;
        std::memcpy(landing(static_cast<char*>(out) + to.starts[rank] * element, size),
                    area + 2 * table + starts[ranks.rank] * element, size);
      }
    });
  });
}

using Messages = std::vector<SharedGroup::Message>;

HcclResult submit_messages(const char* name, SharedGroup& ranks, const Messages& messages, aclrtStream stream) {
  Spans given;
  for (const auto& message : messages)
    if (!message.is_received) given.push_back({message.data, message.bytes});
  return submit_guarded(name, ranks, given, stream, [=, &ranks] {
    auto landed = messages;
    for (auto& message : landed)
      if (message.is_received) message.data = landing(message.data, message.bytes);
    ranks.transfer(name, landed);
    for (const auto& message : messages)
      npu::meters::count_collective(message.is_received ? "recv" : "send", ranks.ranks,
                                    static_cast<int64_t>(message.bytes));
  });
}

// The thread's messages since HcclGroupStart: they are sent together, so that two ranks may both send first.
struct MessageGroup {
  SharedGroup* ranks;
  aclrtStream stream;
  Messages messages;
};
thread_local int group_depth = 0;
thread_local std::vector<MessageGroup> grouped;

HcclResult give_messages(const char* name, SharedGroup& ranks, const Messages& messages, aclrtStream stream) {
  if (!group_depth) return submit_messages(name, ranks, messages, stream);
  auto part = std::find_if(grouped.begin(), grouped.end(),
                           [&](const MessageGroup& one) { return one.ranks == &ranks && one.stream == stream; });
  if (part == grouped.end()) part = grouped.insert(part, {&ranks, stream, {}});
  part->messages.insert(part->messages.end(), messages.begin(), messages.end());
  return HCCL_SUCCESS;
}

}  // namespace

#define HCCL_API extern "C" __attribute__((visibility("default")))

HCCL_API HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  try {
    const auto meeting = make_meeting();
    std::memset(root, 0, sizeof *root);
    std::memcpy(root->internal, &meeting, sizeof meeting);
    return HCCL_SUCCESS;
  } catch (const c10::Error& error) {
    fail(HCCL_E_SYSCALL, error.what_without_backtrace());
    return HCCL_E_SYSCALL;
  }
}
HCCL_API HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, HcclComm* out) {
  return join(root, ranks, rank, nullptr, out);
}
HCCL_API HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* root, uint32_t rank,
                                               const HcclCommConfig* config, HcclComm* out) {
  return join(root, ranks, rank, config, out);
}
HCCL_API HcclResult HcclCommInitAll(uint32_t, int32_t*, HcclComm*) {
  fail(HCCL_E_NOT_SUPPORT, "HcclCommInitAll, several devices in one process, is not emulated");
  return HCCL_E_NOT_SUPPORT;
}
HCCL_API HcclResult HcclCommDestroy(HcclComm communicator) {
  delete static_cast<SharedGroup*>(communicator);
  return HCCL_SUCCESS;
}
HCCL_API HcclResult HcclGetCommName(HcclComm communicator, char* name) {
  std::strcpy(name, group(communicator).name.c_str());
  return HCCL_SUCCESS;
}
HCCL_API HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
// Texts for the codes that calls here return. If this function is missing, vLLM-Ascend's own binding does without HCCL.
HCCL_API const char* HcclGetErrorString(HcclResult code) {
  switch (code) {
    case HCCL_SUCCESS: return "no error";
    case HCCL_E_PARA: return "parameter error";
    case HCCL_E_NOT_SUPPORT: return "feature not support";
    case HCCL_E_SYSCALL: return "system call error";
    default: return "unknown error";
  }
}
HCCL_API uint32_t HcclGetCommConfigCapability() { return 0; }
HCCL_API HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

HCCL_API HcclResult HcclAllReduce(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op,
                                  HcclComm communicator, aclrtStream stream) {
  auto& ranks = group(communicator);
  const size_t bytes = count * width(type);
  return call_reduction("HcclAllReduce", ranks, {in, bytes}, type, op, stream, [=, &ranks] {
    ranks.exchange("HcclAllReduce", words(count, type, op), bytes, copy_of(in, bytes),
                   [&] { reduce(ranks, out, 0, count, type, op); });
  });
}
HCCL_API HcclResult HcclReduce(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                               HcclComm communicator, aclrtStream stream) {
  auto& ranks = group(communicator);
  const size_t bytes = count * width(type);
  return call_reduction("HcclReduce", ranks, {in, bytes}, type, op, stream, [=, &ranks] {
    ranks.exchange("HcclReduce", with_root(words(count, type, op), root), bytes, copy_of(in, bytes), [&] {
      if (ranks.rank == static_cast<int>(root)) reduce(ranks, out, 0, count, type, op);
    });
  });
}
HCCL_API HcclResult HcclReduceScatter(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op,
                                      HcclComm communicator, aclrtStream stream) {
  auto& ranks = group(communicator);
  const size_t bytes = count * ranks.ranks * width(type);
  return call_reduction("HcclReduceScatter", ranks, {in, bytes}, type, op, stream, [=, &ranks] {
    ranks.exchange("HcclReduceScatter", words(count, type, op), bytes, copy_of(in, bytes),
                   [&] { reduce(ranks, out, count * ranks.rank, count, type, op); });
  });
}
HCCL_API HcclResult HcclReduceScatterV(GivenData* in, const void* counts, const void* starts, GivenData* out,
                                       uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm communicator,
                                       aclrtStream stream) {
  auto& ranks = group(communicator);
  const auto sizes = copied(counts, ranks.ranks), from = copied(starts, ranks.ranks);
  const size_t bytes = end_of(sizes, from) * width(type);
  const uint64_t first = from[ranks.rank];
  const auto lists = words(sizes, from) + words_for_own(ranks.rank, count, sizes[ranks.rank]);
  return call_reduction("HcclReduceScatterV", ranks, {in, bytes}, type, op, stream, [=, &ranks] {
    ranks.exchange("HcclReduceScatterV", words(bytes / width(type), type, op) + lists, bytes, copy_of(in, bytes),
                   [&] { reduce(ranks, const_cast<void*>(out), first, count, type, op); });
  });
}
HCCL_API HcclResult HcclAllGather(void* in, void* out, uint64_t count, HcclDataType type, HcclComm communicator,
                                  aclrtStream stream) {
  auto& ranks = group(communicator);
  const size_t bytes = count * width(type);
  return call("HcclAllGather", ranks, {in, bytes}, stream, [=, &ranks] {
    ranks.exchange("HcclAllGather", words(count, type), bytes, copy_of(in, bytes), [&] {
      for (int rank = 0; rank < ranks.ranks; ++rank)
        std::memcpy(landing(static_cast<char*>(out) + rank * bytes, bytes), ranks.given(rank), bytes);
    });
  });
}
HCCL_API HcclResult HcclAllGatherV(GivenData* in, uint64_t count, GivenData* out, const void* counts,
                                   const void* starts, HcclDataType type, HcclComm communicator, aclrtStream stream) {
  auto& ranks = group(communicator);
  const size_t element = width(type), bytes = count * element;
  const auto sizes = copied(counts, ranks.ranks), to = copied(starts, ranks.ranks);
  const auto lists = words(sizes, to) + words_for_own(ranks.rank, count, sizes[ranks.rank]);
  return call("HcclAllGatherV", ranks, {in, bytes}, stream, [=, &ranks] {
    const auto all = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
    ranks.exchange("HcclAllGatherV", words(all, type) + lists, bytes, copy_of(in, bytes), [&] {
      for (int rank = 0; rank < ranks.ranks; ++rank) {
        auto* place = static_cast<char*>(const_cast<void*>(out)) + to[rank] * element;
        std::memcpy(landing(place, sizes[rank] * element), ranks.given(rank), sizes[rank] * element);
      }
    });
  });
}
HCCL_API HcclResult HcclBroadcast(void* data, uint64_t count, HcclDataType type, uint32_t root, HcclComm communicator,
                                  aclrtStream stream) {
  auto& ranks = group(communicator);
  const bool is_root = ranks.rank == static_cast<int>(root);
  const size_t bytes = count * width(type), given = is_root ? bytes : 0;
  return call("HcclBroadcast", ranks, {data, given}, stream, [=, &ranks] {
    ranks.exchange("HcclBroadcast", with_root(words(count, type), root), given, copy_of(data, given), [&] {
      if (!is_root) std::memcpy(landing(data, bytes), ranks.given(static_cast<int>(root)), bytes);
    });
  });
}
HCCL_API HcclResult HcclScatter(void* in, void* out, uint64_t count, HcclDataType type, uint32_t root,
                                HcclComm communicator, aclrtStream stream) {
  auto& ranks = group(communicator);
  const size_t bytes = count * width(type);
  const size_t given = ranks.rank == static_cast<int>(root) ? bytes * ranks.ranks : 0;
  return call("HcclScatter", ranks, {in, given}, stream, [=, &ranks] {
    ranks.exchange("HcclScatter", with_root(words(count, type), root), given, copy_of(in, given),
                   [&] {
                      std::memcpy(landing(out, bytes), ranks.given(static_cast<int>(root)) + ranks.rank * bytes, bytes);
                    });
  });
}
HCCL_API HcclResult HcclAlltoAllV(const void* in, const void* counts, const void* starts, HcclDataType type,
                                  const void* out, const void* out_counts, const void* out_starts, HcclDataType,
                                  HcclComm communicator, aclrtStream stream) {
  const int ranks = group(communicator).ranks;
  return all_to_all("HcclAlltoAllV", in, {copied(counts, ranks), copied(starts, ranks)}, const_cast<void*>(out),
                    {copied(out_counts, ranks), copied(out_starts, ranks)}, type, communicator, stream);
}
HCCL_API HcclResult HcclAlltoAll(const void* in, uint64_t count, HcclDataType type, const void* out, uint64_t,
                                 HcclDataType, HcclComm communicator, aclrtStream stream) {
  Parts parts;
  for (int rank = 0; rank < group(communicator).ranks; ++rank) {
    parts.counts.push_back(count);
    parts.starts.push_back(count * rank);
  }
  return all_to_all("HcclAlltoAll", in, parts, const_cast<void*>(out), parts, type, communicator, stream);
}

HCCL_API HcclResult HcclSend(void* data, uint64_t count, HcclDataType type, uint32_t to, HcclComm communicator,
                             aclrtStream stream) {
  return give_messages("HcclSend", group(communicator), {{false, data, count * width(type), static_cast<int>(to)}}, stream);
}
HCCL_API HcclResult HcclRecv(void* data, uint64_t count, HcclDataType type, uint32_t from, HcclComm communicator,
                             aclrtStream stream) {
  return give_messages("HcclRecv", group(communicator), {{true, data, count * width(type), static_cast<int>(from)}}, stream);
}
HCCL_API HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm communicator,
                                      aclrtStream stream) {
  Messages messages;
  for (const auto* item = items; item != items + count; ++item) {
    const size_t bytes = item->count * width(item->dataType);
    messages.push_back({item->sendRecvType == HCCL_RECV, item->buf, bytes, static_cast<int>(item->remoteRank)});
  }
  return give_messages("HcclBatchSendRecv", group(communicator), messages, stream);
}
// CANN 9 has these functions in libhcomm.so.
HCCL_API HcclResult HcclGroupStart() {
  ++group_depth;
  return HCCL_SUCCESS;
}
HCCL_API HcclResult HcclGroupEnd() {
  if (group_depth == 0) {
    fail(HCCL_E_PARA, "HcclGroupEnd without a HcclGroupStart");
    return HCCL_E_PARA;
  }
  if (--group_depth) return HCCL_SUCCESS;
  HcclResult first = HCCL_SUCCESS;
  for (const auto& part : std::exchange(grouped, {})) {
    const auto result = submit_messages("HcclGroupEnd", *part.ranks, part.messages, part.stream);
    if (first == HCCL_SUCCESS) first = result;
  }
  return first;
}
