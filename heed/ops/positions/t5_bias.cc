// T5's relative position bias and its gradient.
//
// The bias is constant along diagonals: a head has one vector of Tq + Tk - 1 numbers, and row i is a window of it that
// begins at Tq - 1 - i. Forward copies windows; backward adds rows to such a vector, and the vector to buckets.
#include "heed/ops/positions/t5_bias.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "heed/mechanism/check_internal.h"

namespace heed {
namespace {

using mechanism::Fail;

constexpr char kOp[] = "t5_bias";
constexpr char kBackwardOp[] = "t5_bias_backward";
constexpr int64_t kBlockRows = 32;  // rows per task

// The first distance of each bucket of a side except the first bucket.
std::vector<int64_t> BucketStarts(int64_t nb, int64_t max_distance) {
  const int64_t m = nb / 2;
  std::vector<int64_t> starts;
  for (int64_t k = 1; k < nb; ++k) {
    if (k <= m) {
      starts.push_back(k);
      continue;
    }
    // The smallest n with n >= m (max_distance / m)^((k - m) / (nb - m)). Where this is an integer, its f64 value may
    // exceed it, by less than this.
    constexpr double kRounding = 1e-12;
    const double limit = static_cast<double>(m) * std::pow(static_cast<double>(max_distance) / static_cast<double>(m),
                                                           static_cast<double>(k - m) / static_cast<double>(nb - m));
    starts.push_back(static_cast<int64_t>(std::ceil(limit * (1 - kRounding))));
  }
  return starts;
}

// bucket[r] of the diagonal j - i = r - (Tq - 1).
std::vector<int64_t> BucketsOfDiagonals(int64_t buckets, T5Direction direction, const T5BiasOptions& options,
                                        int64_t Tq, int64_t Tk) {
  const bool both = direction == T5Direction::kBidirectional;
  const int64_t nb = both ? buckets / 2 : buckets;
  const std::vector<int64_t> starts = BucketStarts(nb, options.max_distance);
  const int64_t first = options.top_left ? 1 - Tq : 1 - Tk;  // j - p_i of r = 0
  std::vector<int64_t> result(static_cast<size_t>(Tq + Tk - 1));
  for (size_t r = 0; r < result.size(); ++r) {
    const int64_t distance = first + static_cast<int64_t>(r);
    const int64_t n = distance <= 0 ? -distance : both ? distance : int64_t{0};
    result[r] = std::upper_bound(starts.begin(), starts.end(), n) - starts.begin() + (both && distance > 0 ? nb : 0);
  }
  return result;
}

// Checks for both directions: `table` [buckets, H] and `bias` [H, Tq, Tk], one read and the other written.
void Check(const char* op, const char* table_name, const ConstTensorView& table, const char* bias_name,
           const ConstTensorView& bias, T5Direction direction, const T5BiasOptions& options) {
  mechanism::CheckFloat(op, table_name, table);
  mechanism::CheckFloat(op, bias_name, bias);
  if (table.rank() != 2) {
    Fail(op, table_name, "has shape " + table.ShapeString(), "[buckets, H]");
  }
  const int64_t buckets = table.size(0);
  const bool both = direction == T5Direction::kBidirectional;
  if (buckets < (both ? 4 : 2) || (both && buckets % 2 != 0)) {
    Fail(op, "buckets", "is " + std::to_string(buckets), both ? "an even number of at least 4" : "at least 2");
  }
  const int64_t m = (both ? buckets / 2 : buckets) / 2;
  constexpr int64_t kMaxDistance = int64_t{1} << 40;
  if (options.max_distance <= m || options.max_distance > kMaxDistance) {
    Fail(op, "max_distance", "is " + std::to_string(options.max_distance),
         "more than the " + std::to_string(m) + " distances with a bucket of their own, and at most 2^40");
  }
  if (bias.rank() != 3 || bias.size(0) != table.size(1)) {
    Fail(op, bias_name, "has shape " + bias.ShapeString(), "[" + std::to_string(table.size(1)) + ", Tq, Tk]");
  }
  if (table.dtype() != bias.dtype()) {
    Fail(op, bias_name, std::string("has dtype ") + Name(bias.dtype()),
         std::string(Name(table.dtype())) + " as " + table_name);
  }
}

// Copies bits: an unsigned integer represents a float of its size.
template <class Bits>
void Spread(Context& ctx, const ConstTensorView& table, const std::vector<int64_t>& bucket, const TensorView& bias) {
  const int64_t H = bias.size(0), Tq = bias.size(1), Tk = bias.size(2);
  std::vector<Bits> lines;
  lines.reserve(static_cast<size_t>(H) * bucket.size());
  for (int64_t h = 0; h < H; ++h) {
    for (const int64_t k : bucket) {
      lines.push_back(table.as<Bits>()[k * table.stride(0) + h * table.stride(1)]);
    }
  }
  const int64_t blocks = (Tq + kBlockRows - 1) / kBlockRows;
  ctx.ParallelFor(H * blocks, [&](int64_t task, int) {
    const int64_t h = task / blocks, begin = task % blocks * kBlockRows;
    const int64_t end = std::min(begin + kBlockRows, Tq);
    const Bits* line = lines.data() + static_cast<size_t>(h) * bucket.size();
    for (int64_t i = begin; i < end; ++i) {
      const Bits* window = line + (Tq - 1 - i);
      Bits* row = bias.as<Bits>() + h * bias.stride(0) + i * bias.stride(1);
      if (bias.stride(2) == 1) {
        std::memcpy(row, window, static_cast<size_t>(Tk) * sizeof(Bits));
        continue;
      }
      for (int64_t j = 0; j < Tk; ++j) row[j * bias.stride(2)] = window[j];
    }
  });
}

template <class T>
void AddElements(const T* row, int64_t stride, int64_t n, double* line) {
  if (stride == 1) {  // which compilers vectorise
    for (int64_t j = 0; j < n; ++j) line[j] += row[j];
  } else {
    for (int64_t j = 0; j < n; ++j) line[j] += row[j * stride];
  }
}

// Adds the row of n elements from `offset` on to `line`.
void AddRow(const ConstTensorView& t, int64_t offset, int64_t n, double* line) {
  const int64_t stride = t.stride(t.rank() - 1);
  switch (t.dtype()) {
    case DType::kF32: return AddElements(t.as<float>() + offset, stride, n, line);
    case DType::kF64: return AddElements(t.as<double>() + offset, stride, n, line);
    default:
      for (int64_t j = 0; j < n; ++j) line[j] += LoadAsDouble(t.dtype(), t.data(), offset + j * stride);
  }
}

}  // namespace

void T5Bias(Context& ctx, const ConstTensorView& table, T5Direction direction, const T5BiasOptions& options,
            const TensorView& bias) {
  Check(kOp, "table", table, "bias", bias, direction, options);
  mechanism::CheckWritable(kOp, "bias", bias, "table", table);
  if (bias.num_elements() == 0) return;
  const std::vector<int64_t> bucket = BucketsOfDiagonals(table.size(0), direction, options, bias.size(1), bias.size(2));
  switch (SizeOf(table.dtype())) {
    case 8: return Spread<uint64_t>(ctx, table, bucket, bias);
    case 4: return Spread<uint32_t>(ctx, table, bucket, bias);
    default: return Spread<uint16_t>(ctx, table, bucket, bias);
  }
}

void T5BiasBackward(Context& ctx, const ConstTensorView& dbias, T5Direction direction, const T5BiasOptions& options,
                    const TensorView& dtable) {
  Check(kBackwardOp, "dtable", dtable, "dbias", dbias, direction, options);
  mechanism::CheckWritable(kBackwardOp, "dtable", dtable, "dbias", dbias);
  if (dtable.num_elements() == 0) return;  // whatever the number of buckets
  const int64_t H = dbias.size(0), Tq = dbias.size(1), Tk = dbias.size(2);
  const auto buckets = static_cast<size_t>(dtable.size(0));
  std::vector<int64_t> bucket;
  if (Tq > 0 && Tk > 0) {
    bucket = BucketsOfDiagonals(dtable.size(0), direction, options, Tq, Tk);
  }
  ctx.ReserveScratch((std::ssize(bucket) + dtable.size(0)) * int64_t{sizeof(double)});
  ctx.ParallelFor(H, [&](int64_t h, int worker) {
    double* const line = static_cast<double*>(ctx.Scratch(worker));
    double* const sums = line + bucket.size();
    std::fill_n(line, bucket.size() + buckets, 0.0);
    for (int64_t i = 0; i < Tq && Tk > 0; ++i) {
      AddRow(dbias, h * dbias.stride(0) + i * dbias.stride(1), Tk, line + (Tq - 1 - i));
    }
    for (size_t r = 0; r < bucket.size(); ++r) {
      sums[static_cast<size_t>(bucket[r])] += line[r];
    }
    for (size_t k = 0; k < buckets; ++k) {
      StoreDouble(dtable.dtype(), dtable.data(), static_cast<int64_t>(k) * dtable.stride(0) + h * dtable.stride(1),
                  sums[k]);
    }
  });
}

}  // namespace heed
