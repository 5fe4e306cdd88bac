// The keys that a row sees, as intervals; for CPUs and GPUs.
#ifndef HEED_ENGINES_SOFTMAX_KEY_RUNS_H_
#define HEED_ENGINES_SOFTMAX_KEY_RUNS_H_

#include <algorithm>
#include <cstdint>

namespace heed::softmax {

inline constexpr int64_t kUnlimited = INT64_MAX;

struct Interval {
  int64_t begin = 0, end = 0;
  constexpr bool empty() const { return begin >= end; }
  constexpr int64_t size() const { return empty() ? 0 : end - begin; }
  constexpr bool Contains(const Interval& other) const { return begin <= other.begin && other.end <= end; }
  friend constexpr bool operator==(const Interval&, const Interval&) = default;
};

constexpr Interval Intersect(const Interval& a, const Interval& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Two disjoint intervals of keys in ascending order. The first is often empty.
struct KeyRuns {
  Interval first, second;
  constexpr int64_t size() const { return first.size() + second.size(); }
};

constexpr int64_t FloorDivide(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0); }

// Returns the keys that query `query` of a sequence sees under the problem's causal mask, window, chunks and lengths.
template <class Problem, class Sequence>
constexpr KeyRuns KeyRunsOf(const Problem& p, const Sequence& s, int64_t query) {
  if (query >= s.query_end) return {};
  const int64_t position = s.start + query;
  Interval all = {s.key_begin, s.key_end};
  if (p.causal) {
    all = Intersect(all, {s.key_begin, std::max(position + 1, s.prefix_end)});
  }
  if (p.chunk > 0) {
    const int64_t index = FloorDivide(position - s.key_begin, p.chunk);
    // Chunks before the first or beyond the last key have no keys. The index is tested first, so that the products stay
    // inside int64.
    if (index < 0 || index > (s.num_keys - s.key_begin) / p.chunk) return {};
    const int64_t begin = s.key_begin + index * p.chunk;
    all = Intersect(all, {begin, begin + std::min(p.chunk, s.num_keys)});
  }
  if (all.empty()) return {};
  if (p.window_left == kUnlimited && p.window_right == kUnlimited) return {{}, all};
  const Interval window = {p.window_left == kUnlimited ? 0 : position - p.window_left,
                           p.window_right == kUnlimited ? s.num_keys : position + p.window_right + 1};
  const Interval sinks = Intersect(all, {s.key_begin, s.sink_end});
  const Interval rest = Intersect(all, window);
  if (sinks.empty()) return {{}, rest};
  if (rest.empty()) return {sinks, {}};
  if (rest.begin <= sinks.end) {  // the two intervals meet: one run
    return {{}, {sinks.begin, std::max(sinks.end, rest.end)}};
  }
  return {sinks, rest};
}

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_KEY_RUNS_H_
