// The options of attention of some rows to some keys, from those of the whole sequence.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/distributed/attention_internal.h"
#include "heed/distributed/group_internal.h"

namespace heed::distributed {
namespace {

constexpr int64_t kMostPositions = int64_t{1} << 61;  // as attention has it

ConstTensorView ViewOf(const std::vector<int64_t>& numbers, int64_t size) {
  const Shape shape = {size};
  return {numbers.data(), DType::kI64, shape};
}

// The part of tokens [begin, begin + count) that lies before `at`.
int64_t Within(int64_t at, int64_t begin, int64_t count) { return std::clamp<int64_t>(at - begin, 0, count); }

}  // namespace

std::vector<int64_t> WholeOptions::Load(const char* name, const ConstTensorView& t, int64_t size, int64_t low,
                                        int64_t high) const {
  std::vector<int64_t> numbers;
  if (!t.present()) return numbers;
  if ((t.dtype() != DType::kI32 && t.dtype() != DType::kI64) || t.rank() != 1 || t.size(0) != size) {
    Refuse(op_, name, std::string("is ") + Name(t.dtype()) + " " + t.ShapeString(),
           "i32 or i64 [" + std::to_string(size) + "]");
  }
  for (int64_t b = 0; b < size; ++b) {
    numbers.push_back(LoadAsInt64(t.dtype(), t.data(), b * t.stride(0)));
    if (numbers.back() >= low && numbers.back() <= high) continue;
    Refuse(op_, name, "contains " + std::to_string(numbers.back()),
           std::to_string(low) + " to " + std::to_string(high));
  }
  return numbers;
}

WholeOptions::WholeOptions(const std::string& op, const attention::Options& options, int64_t batch, int64_t total)
    : op_(op), options_(options), num_sequences_(batch), total_(total) {
  if (options.cu_seqlens_q.present()) {
    const bool own_keys = options.cu_seqlens_k.present();
    const ConstTensorView& of_keys = own_keys ? options.cu_seqlens_k : options.cu_seqlens_q;
    const int64_t size = options.cu_seqlens_q.rank() == 1 ? std::max<int64_t>(options.cu_seqlens_q.size(0), 1) : 1;
    num_sequences_ = size - 1;
    for (const auto& [name, view, cu] : {std::tuple("cu_seqlens_q", &options.cu_seqlens_q, &cu_q_),
                                         {own_keys ? "cu_seqlens_k" : "cu_seqlens_q", &of_keys, &cu_k_}}) {
      *cu = Load(name, *view, size, 0, total);
      if ((*cu)[0] != 0) Refuse(op, name, "begins with " + std::to_string((*cu)[0]), "0");
      if (!std::ranges::is_sorted(*cu)) Refuse(op, name, "is " + ShapeString(*cu), "ascending offsets");
    }
  }
  const int64_t size = num_sequences_;
  query_starts_ = Load("query_starts", options.query_starts, size, -kMostPositions, kMostPositions);
  key_lengths_ = Load("key_lengths", options.key_lengths, size, 0, total);
  key_starts_ = Load("key_starts", options.key_starts, size, 0, total);
  query_lengths_ = Load("query_lengths", options.query_lengths, size, 0, total);
  prefix_ = Load("prefix", options.prefix, size, 0, kMostPositions);
}

PartOptions WholeOptions::Of(const TokenRange& rows, int64_t first, const TokenRange& keys) const {
  PartOptions part{.options = options_};
  attention::Options& here = part.options;
  // An empty tensor has an address too.
  const auto numbers = [&](int64_t size) -> std::vector<int64_t>& {
    return part.memory.emplace_back(static_cast<size_t>(std::max<int64_t>(size, 1)));
  };
  const auto replace = [&](ConstTensorView& t, const auto& at) {
    std::vector<int64_t>& of_part = numbers(num_sequences_);
    for (int64_t b = 0; b < num_sequences_; ++b) of_part[static_cast<size_t>(b)] = at(static_cast<size_t>(b));
    t = ViewOf(of_part, num_sequences_);
  };
  // Positions count from the first of these keys, of each sequence.
  replace(here.query_starts, [&](size_t b) {
    int64_t start = query_starts_.empty() ? 0 : query_starts_[b];
    if (!is_packed()) return start + rows.begin - keys.begin;
    const int64_t num_queries = cu_q_[b + 1] - cu_q_[b], num_keys = cu_k_[b + 1] - cu_k_[b];
    if (query_starts_.empty() && options_.align == attention::Align::kBottomRight) start = num_keys - num_queries;
    return start + Within(rows.begin, cu_q_[b], num_queries) - Within(keys.begin, cu_k_[b], num_keys);
  });
  here.align = attention::Align::kBottomRight;
  if (is_packed()) {
    std::vector<int64_t>&q = numbers(num_sequences_ + 1), &k = numbers(num_sequences_ + 1);
    for (size_t i = 0; i < cu_q_.size(); ++i) {
      q[i] = Within(cu_q_[i], rows.begin, rows.size());
      k[i] = Within(cu_k_[i], keys.begin, keys.size());
    }
    here.cu_seqlens_q = ViewOf(q, num_sequences_ + 1);
    here.cu_seqlens_k = ViewOf(k, num_sequences_ + 1);
  }
  if (!query_lengths_.empty()) {
    replace(here.query_lengths, [&](size_t b) { return Within(query_lengths_[b], rows.begin, rows.size()); });
  }
  if (!key_lengths_.empty()) {
    replace(here.key_lengths, [&](size_t b) { return Within(key_lengths_[b], keys.begin, keys.size()); });
  }
  const auto key_start = [&](size_t b) {
    return key_starts_.empty() ? 0 : Within(key_starts_[b], keys.begin, keys.size());
  };
  if (!key_starts_.empty()) replace(here.key_starts, key_start);
  if (!prefix_.empty()) {
    replace(here.prefix, [&](size_t b) {
      const int64_t end = prefix_[b] + (key_starts_.empty() ? 0 : key_starts_[b]) - keys.begin;
      return std::max<int64_t>(end - key_start(b), 0);
    });
  }
  here.sink_tokens = std::max<int64_t>(options_.sink_tokens - keys.begin, 0);
  for (ConstTensorView* pairs : {&here.mask, &here.bias}) {
    *pairs = SliceUnlessOne(SliceUnlessOne(*pairs, 2, first, rows.size()), 1, keys.begin, keys.size());
  }
  if (here.segments_q.present()) here.segments_q = here.segments_q.Slice(1, first, first + rows.size());
  if (here.segments_k.present()) here.segments_k = here.segments_k.Slice(1, keys.begin, keys.end);
  return part;
}

bool WholeOptions::Sees(const TokenRange& rows, const TokenRange& keys) const {
  if (rows.size() == 0 || keys.size() == 0) return false;
  // Other positions than those of the tokens.
  if (!query_starts_.empty() || options_.cu_seqlens_k.present()) return true;
  const auto [left, right] = options_.window;
  const bool all_before = left < 0 || left >= rows.begin, all_after = right < 0 || right >= total_ - rows.end;
  const bool in_window = (all_before && all_after) || options_.sink_tokens > keys.begin ||
                         ((all_before || keys.end > rows.begin - left) && (all_after || keys.begin < rows.end + right));
  return in_window && (!options_.causal || !prefix_.empty() || keys.begin < rows.end);
}

}  // namespace heed::distributed
