// The parts of a sequence that ranks hold, and copies of them.
#include "heed/distributed/shards.h"

#include <algorithm>
#include <string>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/distributed/group_internal.h"
#include "heed/distributed/shards_internal.h"

namespace heed::distributed {
namespace {

constexpr int64_t kGrid = 64;  // tokens

void CheckAxis(const std::string& operation, const ConstTensorView& t, int axis) {
  if (t.present() && axis >= 0 && axis < t.rank()) return;
  Refuse(operation, "axis", "is " + std::to_string(axis),
         "an axis of the tensor, which has " + std::to_string(t.rank()));
}

void CheckLike(const std::string& operation, const char* name, const ConstTensorView& t, const ConstTensorView& like,
               int axis, int64_t tokens) {
  CheckOnCpu(operation, name, t);
  const Shape shape = Resized(like, axis, tokens);
  if (t.present() && t.dtype() == like.dtype() && std::ranges::equal(t.sizes(), shape)) return;
  Refuse(operation, name, t.present() ? std::string("is ") + Name(t.dtype()) + " " + t.ShapeString() : "is absent",
         std::string(Name(like.dtype())) + " " + ShapeString(shape));
}

}  // namespace

std::vector<std::vector<TokenRange>> ShardRanges(int64_t tokens, int ranks, Order order) {
  if (tokens < 0) Refuse("ShardRanges", "tokens", "is " + std::to_string(tokens), "0 or more");
  if (ranks < 1) Refuse("ShardRanges", "ranks", "is " + std::to_string(ranks), "1 or more");
  const int64_t parts = order == Order::kZigzag ? 2 * int64_t{ranks} : ranks;
  const int64_t grid = tokens >= kGrid * parts ? kGrid : 1;
  const auto begin = [&](int64_t part) { return part == parts ? tokens : tokens * part / parts / grid * grid; };
  std::vector<std::vector<TokenRange>> ranges(static_cast<size_t>(ranks));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::vector<TokenRange>& own = ranges[static_cast<size_t>(rank)];
    own.push_back({begin(rank), begin(rank + 1)});
    if (order == Order::kZigzag) own.push_back({begin(parts - 1 - rank), begin(parts - rank)});
  }
  return ranges;
}

int64_t CountTokens(const std::vector<TokenRange>& ranges) {
  int64_t count = 0;
  for (const TokenRange& range : ranges) count += range.size();
  return count;
}

std::vector<std::vector<TokenRange>> RangesOfCounts(const std::vector<int64_t>& counts) {
  std::vector<std::vector<TokenRange>> ranges;
  int64_t begin = 0;
  for (const int64_t count : counts) {
    ranges.push_back({{begin, begin + count}});
    begin += count;
  }
  return ranges;
}

std::vector<std::vector<TokenRange>> AgreedRanges(const std::string& operation, const std::vector<int64_t>& counts,
                                                  Order order) {
  if (order == Order::kContiguous) return RangesOfCounts(counts);
  int64_t total = 0;
  for (const int64_t count : counts) total += count;
  std::vector<std::vector<TokenRange>> ranges = ShardRanges(total, static_cast<int>(counts.size()), order);
  Shape expected;
  for (const std::vector<TokenRange>& own : ranges) expected.push_back(CountTokens(own));
  if (counts != expected) {
    Refuse(operation, "tokens of ranks", "are " + ShapeString(counts), ShapeString(expected) + " in zigzag order");
  }
  return ranges;
}

Owned Gathered(const Group& group, const ConstTensorView& part, int axis,
               const std::vector<std::vector<TokenRange>>& ranges) {
  int64_t total = 0, most = 0;
  for (const std::vector<TokenRange>& own : ranges) {
    total += CountTokens(own);
    most = std::max(most, CountTokens(own));
  }
  Owned whole(part.dtype(), Resized(part, axis, total));
  Bytes sent = Packed(part);
  const int64_t row = ConstTensorView(nullptr, part.dtype(), Resized(part, axis, 1)).num_elements();
  const size_t padded = static_cast<size_t>(most * row) * SizeOf(part.dtype());
  sent.resize(padded);
  const Bytes received = AllGather(group, sent);
  for (size_t r = 0; r < ranges.size(); ++r) {
    const ConstTensorView from(received.data() + r * padded, part.dtype(), Resized(part, axis, CountTokens(ranges[r])));
    int64_t first = 0;
    for (const TokenRange& range : ranges[r]) {
      Copy(from.Slice(axis, first, first + range.size()), whole.view().Slice(axis, range.begin, range.end));
      first += range.size();
    }
  }
  return whole;
}

void Shard(const Group& group, const ConstTensorView& whole, int axis, Order order, const TensorView& part) {
  CheckAxis("Shard", whole, axis);
  CheckOnCpu("Shard", "whole", whole);
  const auto ranges = ShardRanges(whole.size(axis), group.size(), order);
  const std::vector<TokenRange>& own = ranges[static_cast<size_t>(group.rank())];
  CheckLike("Shard", "part", part, whole, axis, CountTokens(own));
  CheckApart("Shard", std::span(&whole, 1), std::span(&part, 1));
  int64_t first = 0;
  for (const TokenRange& range : own) {
    Copy(whole.Slice(axis, range.begin, range.end), part.Slice(axis, first, first + range.size()));
    first += range.size();
  }
}

void Unshard(const Group& group, const ConstTensorView& part, int axis, Order order, const TensorView& whole) {
  const bool valid = part.present() && axis >= 0 && axis < part.rank();
  const auto describe = [&] {
    CheckAxis("Unshard", part, axis);
    CheckOnCpu("Unshard", "part", part);
    CheckAxis("Unshard", whole, axis);
    CheckLike("Unshard", "whole", whole, part, axis, whole.size(axis));
    CheckApart("Unshard", std::span(&part, 1), std::span(&whole, 1));
    return "Unshard(" + Described("part", part, axis) +
           ", order=" + (order == Order::kZigzag ? "zigzag" : "contiguous") +
           ", T=" + std::to_string(whole.size(axis)) + ")";
  };
  const Numbers own = {valid ? part.size(axis) : 0};
  std::vector<int64_t> counts;
  for (const Numbers& numbers : Agree(group, "Unshard", own, describe)) counts.push_back(numbers[0]);
  const auto ranges = AgreedRanges("Unshard", counts, order);
  int64_t total = 0;
  for (const int64_t count : counts) total += count;
  CheckLike("Unshard", "whole", whole, part, axis, total);
  Copy(Gathered(group, part, axis, ranges).view(), whole);
}

}  // namespace heed::distributed
