// Selection of blocks and its bound: f32 bounds per block, summed in double.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "heed/core/carver.h"
#include "heed/engines/softmax/certified/sketch.h"
#include "heed/ops/sparse/certified_attention/certified_choice_internal.h"

namespace heed::certified_attention {
namespace {

constexpr double kUp = 1 + softmax::kSketchError, kDown = 1 - softmax::kSketchError;
constexpr double kOfBound = 1 + 1e-5;  // for the sums and the quotient

// Bounds the sum of masses that f32 has flushed to zero, each below 64 times its least number.
double Flushed(int64_t blocks) { return static_cast<double>(blocks) * 0x1p-120; }

double BoundOf(double dropped, double kept, int64_t blocks) {
  const double upper = dropped * kUp + Flushed(blocks);
  return upper / (kept * kDown + upper) * kOfBound;
}

// The bin of a mass: bins are a sixteenth of an octave wide from 2^-60 on; smaller masses share the first one.
int64_t BinOf(float x, int64_t bins) {
  constexpr int64_t kFirst = (127 - 60) << 4;
  return std::clamp<int64_t>((std::bit_cast<uint32_t>(x) >> 19) - kFirst, 0, bins - 1);
}

bool IsKnown(float upper) { return upper < std::numeric_limits<float>::infinity(); }

}  // namespace

float BoundOf(const RowMasses& masses, const uint8_t* kept) {
  double of_dropped = 0, of_kept = masses.sink;
  bool drops = false;
  for (int64_t i = 0; i < masses.blocks; ++i) {
    if (!masses.Sees(i)) continue;
    if (kept[i] != 0) {
      of_kept += static_cast<double>(masses.lower[i]);
    } else {
      drops = true;
      of_dropped += static_cast<double>(masses.upper[i]);
    }
  }
  if (!drops) return 0;
  const double bound = BoundOf(of_dropped, of_kept, masses.blocks);
  const auto rounded = static_cast<float>(bound);
  const float up = static_cast<double>(rounded) < bound ? std::nextafter(rounded, 2.0f) : rounded;
  return std::max(up, std::numeric_limits<float>::min());
}

int64_t Chooser::Bytes(int64_t blocks) {
  Carver carver(nullptr);
  double* bins = nullptr;
  int32_t* list = nullptr;
  carver.Next(bins, kBins);
  carver.Next(bins, kBins);
  carver.Next(list, blocks);
  return carver.bytes();
}

Chooser::Chooser(void* memory, int64_t blocks) {
  Carver carver(memory);
  carver.Next(upper_, kBins);
  carver.Next(lower_, kBins);
  carver.Next(last_, blocks);
}

void Chooser::Keep(const RowMasses& m, double epsilon, uint8_t* kept) {
  const double most = epsilon * (1 - 1e-6);  // margin for the last rounding of the bound
  std::fill_n(upper_, kBins, 0.0);
  std::fill_n(lower_, kBins, 0.0);
  double of_kept = m.sink, of_dropped = 0;
  for (int64_t i = 0; i < m.blocks; ++i) {
    if (!m.Sees(i)) continue;
    if (!IsKnown(m.upper[i])) kept[i] = 1;
    of_kept += static_cast<double>(m.lower[i]);
    if (kept[i] != 0) continue;
    const int64_t bin = BinOf(m.upper[i], kBins);
    upper_[bin] += static_cast<double>(m.upper[i]);
    lower_[bin] += static_cast<double>(m.lower[i]);
  }
  const auto fits = [&](double upper, double lower) {
    return BoundOf(of_dropped + upper, std::max(of_kept - lower, 0.0) * (1 - 1e-12), m.blocks) <= most;
  };
  // Drops the smallest masses first: whole bins, then the smallest blocks of one bin.
  int64_t bin = 0;
  for (; bin < kBins && fits(upper_[bin], lower_[bin]); ++bin) {
    of_dropped += upper_[bin];
    of_kept -= lower_[bin];
  }
  int32_t* end = last_;
  for (int64_t i = 0; i < m.blocks; ++i) {
    if (kept[i] != 0 || !m.Sees(i)) continue;
    const int64_t of_block = BinOf(m.upper[i], kBins);
    if (of_block > bin) kept[i] = 1;
    if (of_block == bin) *end++ = static_cast<int32_t>(i);
  }
  std::sort(last_, end,
            [&](int32_t a, int32_t b) { return m.upper[a] != m.upper[b] ? m.upper[a] > m.upper[b] : a < b; });
  while (end > last_ && fits(static_cast<double>(m.upper[end[-1]]), static_cast<double>(m.lower[end[-1]]))) {
    --end;
    of_dropped += static_cast<double>(m.upper[*end]);
    of_kept -= static_cast<double>(m.lower[*end]);
  }
  for (const int32_t* i = last_; i < end; ++i) kept[*i] = 1;
}

}  // namespace heed::certified_attention
