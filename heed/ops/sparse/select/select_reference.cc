// Selectors from their definitions in select.h: scalar, in double, by sorting.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "heed/patterns/pattern_internal.h"
#include "heed/ops/sparse/select/select_internal.h"
#include "heed/ops/sparse/select/select_reference_internal.h"

namespace heed::select {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double At(const ConstTensorView& t, int64_t b, int64_t token, int64_t head, int64_t channel) {
  return LoadAsDouble(t.dtype(), t.data(),
                      b * t.stride(0) + token * t.stride(1) + head * t.stride(2) + channel * t.stride(3));
}

int64_t Entry(const ConstTensorView& t, int64_t b, int64_t otherwise) {
  return t.present() ? LoadAsInt64(t.dtype(), t.data(), b * t.stride(0)) : otherwise;
}

double OrLowest(double score) { return std::isnan(score) ? -kInfinity : score; }

// Indices in descending order of their scores.
std::vector<int64_t> Ranked(const std::map<int64_t, double>& scores) {
  std::vector<int64_t> order;
  for (const auto& [index, score] : scores) order.push_back(index);
  std::ranges::stable_sort(order,
                           [&](int64_t a, int64_t b) { return OrLowest(scores.at(a)) > OrLowest(scores.at(b)); });
  return order;
}

// The place of a row among the blocks of its sequence.
struct Place {
  int64_t p, first_key, end_key, block;

  Place(const ConstTensorView& q, const ConstTensorView& k, const BlockOptions& options, int64_t b, int64_t row)
      : block(options.block) {
    const int64_t Tq = q.size(1), Tk = k.size(1);
    p = row + Entry(options.query_starts, b, options.align == attention::Align::kTopLeft ? 0 : Tk - Tq);
    first_key = Entry(options.key_starts, b, 0);
    end_key = Entry(options.key_lengths, b, Tk);
  }
  int64_t begin(int64_t i) const { return std::max(i * block, first_key); }
  int64_t end(int64_t i) const { return std::min((i + 1) * block, end_key); }
  bool exists(int64_t i) const { return begin(i) < end(i); }
  int64_t own() const { return static_cast<int64_t>(std::floor(static_cast<double>(p) / static_cast<double>(block))); }
};

// The blocks that a row always keeps, and its candidates, without scores.
RowScores Choices(const Place& at, const BlockOptions& options) {
  RowScores row;
  row.has_own = at.exists(at.own());
  int64_t before = 0;  // blocks that exist
  for (int64_t i = 0; i * at.block < at.end_key; ++i) {
    if (!at.exists(i)) continue;
    const bool is_sink = before++ < options.sinks;
    if (options.causal && i > at.own()) continue;
    const bool is_local = i <= at.own() && at.own() - i < options.local;
    if (i == at.own() || is_sink || is_local) {
      row.kept.insert(i);
    } else {
      row.others[i] = 0;
    }
  }
  return row;
}

// <q, mean of the keys>, or the score of the box around them.
double ScoreOf(const ConstTensorView& q, const ConstTensorView& k, const Place& at, bool box, int64_t b, int64_t row,
               int64_t query_head, int64_t block) {
  const int64_t key_head = query_head / (q.size(2) / k.size(2));
  double score = 0;
  for (int64_t d = 0; d < q.size(3); ++d) {
    double sum = 0, smallest = kInfinity, largest = -kInfinity;
    for (int64_t j = at.begin(block); j < at.end(block); ++j) {
      const double x = At(k, b, j, key_head, d);
      sum += x;
      smallest = std::min(smallest, x);
      largest = std::max(largest, x);
      if (std::isnan(x)) return -kInfinity;
    }
    const double x = At(q, b, row, query_head, d);
    score +=
        box ? std::max(x * smallest, x * largest) : x * (sum / static_cast<double>(at.end(block) - at.begin(block)));
    if (std::isnan(x)) return -kInfinity;
  }
  return score;
}

// Query heads of a selecting head.
struct Heads {
  int64_t first, count;
  Heads(const ConstTensorView& q, const ConstTensorView& k, const BlockOptions& options, int64_t head) {
    const bool each = options.share == Share::kHead;
    count = each ? 1 : q.size(2) / k.size(2);
    first = head * count;
  }
};

int64_t NumHeads(const ConstTensorView& q, const ConstTensorView& k, const BlockOptions& options) {
  return options.share == Share::kHead ? q.size(2) : k.size(2);
}

// A table of the rows that f(b, row, head) selects, with `heads` heads or, for 0, none.
template <class F>
patterns::Table Listed(int64_t B, int64_t Tq, int64_t heads, const F& f) {
  std::vector<std::set<int64_t>> all;
  size_t width = 0;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t row = 0; row < Tq; ++row) {
      for (int64_t head = 0; head < std::max<int64_t>(heads, 1); ++head) {
        all.push_back(f(b, row, head));
        width = std::max(width, all.back().size());
      }
    }
  }
  patterns::Table table = {{B, Tq}, {}};
  if (heads > 0) table.shape.push_back(heads);
  table.shape.push_back(static_cast<int64_t>(width));
  for (const auto& row : all) {
    for (size_t i = row.size(); i < width; ++i) table.values.push_back(-1);
    table.values.insert(table.values.end(), row.begin(), row.end());
  }
  return table;
}

}  // namespace

RowScores ScoresOfRow(const ConstTensorView& q, const ConstTensorView& k, const TopBlocksOptions& options, int64_t b,
                      int64_t row, int64_t head) {
  const Place at(q, k, options, b, row);
  RowScores result = Choices(at, options);
  const Heads heads(q, k, options, head);
  for (auto& [block, score] : result.others) {
    for (int64_t h = heads.first; h < heads.first + heads.count; ++h) {
      score += ScoreOf(q, k, at, options.score == Score::kBox, b, row, h, block);
    }
  }
  return result;
}

RowWeights WeightsOfRow(const ConstTensorView& q, const ConstTensorView& k, const CumulativeOptions& options, int64_t b,
                        int64_t row, int64_t head) {
  const Place at(q, k, options, b, row);
  RowWeights result;
  static_cast<RowScores&>(result) = Choices(at, options);
  const Heads heads(q, k, options, head);
  for (int64_t h = heads.first; h < heads.first + heads.count; ++h) {
    std::map<int64_t, double> logits;
    double largest = -kInfinity, total = 0;
    const auto add = [&](int64_t block) {
      logits[block] = OrLowest(ScoreOf(q, k, at, false, b, row, h, block) / std::sqrt(static_cast<double>(q.size(3))));
      largest = std::max(largest, logits[block]);
    };
    for (const auto& [block, unused] : result.others) add(block);
    for (const int64_t block : result.kept) {
      if (block != at.own()) add(block);
    }
    for (auto& [block, x] : logits) {
      x = x == -kInfinity ? 0 : std::exp(x - largest);
      total += x;
    }
    if (total == 0) continue;
    for (const auto& [block, x] : logits) {
      const double weight = x / total / static_cast<double>(heads.count);
      if (result.kept.contains(block)) {
        result.held += weight;
      } else {
        result.others[block] += weight;
      }
    }
  }
  return result;
}

std::map<int64_t, double> IndexerScores(const ConstTensorView& q, const ConstTensorView& k,
                                        const ConstTensorView& weights, const IndexerOptions& options, int64_t b,
                                        int64_t row) {
  std::map<int64_t, double> scores;
  const int64_t Tk = k.size(1), p = row + options.start.value_or(Tk - q.size(1));
  for (int64_t j = 0; j < Tk && (!options.causal || (j + 1) * options.ratio - 1 <= p); ++j) {
    double score = 0;
    for (int64_t h = 0; h < q.size(2); ++h) {
      double product = 0;
      for (int64_t d = 0; d < q.size(3); ++d) {
        product += At(q, b, row, h, d) *
                   LoadAsDouble(k.dtype(), k.data(), b * k.stride(0) + j * k.stride(1) + d * k.stride(2));
      }
      const double weight = LoadAsDouble(weights.dtype(), weights.data(),
                                         b * weights.stride(0) + row * weights.stride(1) + h * weights.stride(2));
      score += weight * (product < 0 ? 0 : product);
    }
    scores[j] = score;
  }
  return scores;
}

HeadSums SumsOfHead(const ConstTensorView& q, const ConstTensorView& k, const VerticalSlashOptions& options, int64_t b,
                    int64_t head) {
  const int64_t Tq = q.size(1), Tk = k.size(1), key_head = head / (q.size(2) / k.size(2));
  HeadSums sums = {std::vector<double>(static_cast<size_t>(Tk)), std::vector<double>(static_cast<size_t>(Tk))};
  for (int64_t row = std::max<int64_t>(Tq - options.last, 0); row < Tq; ++row) {
    const int64_t p = row + Tk - Tq;
    std::vector<double> weights;
    double largest = -kInfinity, total = 0;
    for (int64_t j = 0; j <= p; ++j) {
      double logit = 0;
      for (int64_t d = 0; d < q.size(3); ++d) logit += At(q, b, row, head, d) * At(k, b, j, key_head, d);
      weights.push_back(logit / std::sqrt(static_cast<double>(q.size(3))));
      largest = std::isnan(weights.back()) ? weights.back() : std::max(largest, weights.back());
    }
    for (double& x : weights) total += x = std::exp(x - largest);
    for (int64_t j = 0; j <= p; ++j) {
      sums.by_key[static_cast<size_t>(j)] += weights[static_cast<size_t>(j)] / total;
      sums.by_distance[static_cast<size_t>(p - j)] += weights[static_cast<size_t>(j)] / total;
    }
  }
  return sums;
}

Pattern TopBlocksReference(const ConstTensorView& q, const ConstTensorView& k, const TopBlocksOptions& options) {
  Checked("select::TopBlocks", q, k, options);
  patterns::Table index =
      Listed(q.size(0), q.size(1), NumHeads(q, k, options), [&](int64_t b, int64_t row, int64_t head) {
        const RowScores scores = ScoresOfRow(q, k, options, b, row, head);
        std::set<int64_t> chosen = scores.kept;
        int64_t left = options.count - (scores.has_own ? 1 : 0);
        for (const int64_t block : Ranked(scores.others)) {
          if (left-- > 0) chosen.insert(block);
        }
        return chosen;
      });
  return patterns::Build("row_blocks", {std::move(index), options.block});
}

Pattern CumulativeReference(const ConstTensorView& q, const ConstTensorView& k, const CumulativeOptions& options) {
  Checked("select::Cumulative", q, k, options);
  patterns::Table index =
      Listed(q.size(0), q.size(1), NumHeads(q, k, options), [&](int64_t b, int64_t row, int64_t head) {
        const RowWeights weights = WeightsOfRow(q, k, options, b, row, head);
        std::set<int64_t> chosen = weights.kept;
        double held = weights.held, all = held;
        for (const auto& [block, weight] : weights.others) all += weight;
        for (const int64_t block : Ranked(weights.others)) {
          if (held >= options.mass * all) break;
          held += weights.others.at(block);
          chosen.insert(block);
        }
        return chosen;
      });
  return patterns::Build("row_blocks", {std::move(index), options.block});
}

Pattern VerticalSlashReference(const ConstTensorView& q, const ConstTensorView& k,
                               const VerticalSlashOptions& options) {
  Checked("select::VerticalSlash", q, k, options);
  const int64_t Tk = k.size(1);
  patterns::Table tables[2];
  for (int which = 0; which < 2; ++which) {
    const int64_t forced = std::min(which == 0 ? options.sinks : options.local, Tk);
    tables[which] = Listed(q.size(0), q.size(2), 0, [&](int64_t b, int64_t head, int64_t) {
      const HeadSums sums = SumsOfHead(q, k, options, b, head);
      std::map<int64_t, double> others;
      std::set<int64_t> chosen;
      for (int64_t i = 0; i < Tk; ++i) {
        if (i < forced) {
          chosen.insert(i);
        } else {
          others[i] = (which == 0 ? sums.by_key : sums.by_distance)[static_cast<size_t>(i)];
        }
      }
      int64_t left = (which == 0 ? options.verticals : options.slashes) - forced;
      for (const int64_t i : Ranked(others)) {
        if (left-- > 0) chosen.insert(i);
      }
      return chosen;
    });
  }
  return patterns::VerticalSlash(std::move(tables[0]), std::move(tables[1]));
}

Pattern IndexerReference(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& weights,
                         const IndexerOptions& options) {
  Checked("select::Indexer", q, k, weights, options);
  patterns::Table index = Listed(q.size(0), q.size(1), 0, [&](int64_t b, int64_t row, int64_t) {
    std::set<int64_t> chosen;
    for (const int64_t key : Ranked(IndexerScores(q, k, weights, options, b, row))) {
      if (std::ssize(chosen) < options.count) chosen.insert(key);
    }
    return chosen;
  });
  return patterns::Build("keys", {std::move(index)});
}

}  // namespace heed::select
