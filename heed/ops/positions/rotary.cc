// Rotary position encoding: checks, tables of cosines and sines, tasks.
#include "heed/ops/positions/rotary.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/positions/phase_table_internal.h"
#include "heed/ops/positions/rotary_rows_internal.h"

namespace heed {
namespace {

using mechanism::Fail;
using positions::PhaseRow;
using positions::PhaseTable;

constexpr char kOp[] = "rotary";
constexpr int64_t kMaxPosition = int64_t{1} << 31;
constexpr int64_t kBlockRows = 32;  // tokens per task

// x and y as [B, T, H, D], positions as [B or 1, T].
struct Problem {
  ConstTensorView x;
  TensorView y;
  std::vector<int64_t> positions;
  int64_t position_rows, B, T, H, D, dim;
  RotaryPairs pairs;
  double sign;  // of the sines
};

template <class View>
View WithBatch(const View& t) {
  if (t.rank() == 4) return t;
  return View(t.data(), t.dtype(), {1, t.size(0), t.size(1), t.size(2)}, {0, t.stride(0), t.stride(1), t.stride(2)},
              t.device());
}

std::vector<int64_t> ReadPositions(const ConstTensorView& t) {
  const bool batched = t.rank() == 2;
  const int64_t B = batched ? t.size(0) : 1, T = t.size(batched ? 1 : 0);
  std::vector<int64_t> positions;
  positions.reserve(static_cast<size_t>(B * T));
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < T; ++i) {
      const int64_t at = batched ? b * t.stride(0) + i * t.stride(1) : i * t.stride(0);
      const int64_t position = LoadAsInt64(t.dtype(), t.data(), at);
      if (position < -kMaxPosition || position > kMaxPosition) {
        Fail(kOp, "positions", "contains " + std::to_string(position), "-2^31 to 2^31");
      }
      positions.push_back(position);
    }
  }
  return positions;
}

Problem Check(const ConstTensorView& x, const ConstTensorView& positions, RotaryPairs pairs,
              const RotaryOptions& options, const TensorView& y) {
  mechanism::CheckFloat(kOp, "x", x);
  if ((x.rank() != 4 && x.rank() != 3) || x.size(x.rank() - 1) < 1) {
    Fail(kOp, "x", "has shape " + x.ShapeString(), "[B, T, H, D] or [T, H, D] with D >= 1");
  }
  mechanism::CheckContiguousRows(kOp, "x", x);

  Problem p;
  p.x = WithBatch(x);
  p.B = p.x.size(0);
  p.T = p.x.size(1);
  p.H = p.x.size(2);
  p.D = p.x.size(3);
  p.pairs = pairs;
  p.sign = options.inverse ? -1 : 1;
  p.dim = options.dim.value_or(p.D);
  if (p.dim < 2 || p.dim > p.D || p.dim % 2 != 0) {
    Fail(kOp, "dim", "is " + std::to_string(p.dim), "an even number from 2 to D, " + std::to_string(p.D));
  }

  mechanism::CheckReadable(kOp, "positions", positions);
  if (positions.dtype() != DType::kI32 && positions.dtype() != DType::kI64) {
    Fail(kOp, "positions", std::string("has dtype ") + Name(positions.dtype()), "i32 or i64");
  }
  const bool fits = (positions.rank() == 1 && positions.size(0) == p.T) ||
                    (positions.rank() == 2 && x.rank() == 4 && positions.size(0) == p.B && positions.size(1) == p.T);
  if (!fits) {
    const std::string T = std::to_string(p.T);
    Fail(kOp, "positions", "has shape " + positions.ShapeString(),
         "[" + T + "]" + (x.rank() == 4 ? " or [" + std::to_string(p.B) + "," + T + "]" : ""));
  }
  p.position_rows = positions.rank() == 2 ? positions.size(0) : 1;

  mechanism::CheckReadable(kOp, "y", y);
  if (y.dtype() != x.dtype()) {
    Fail(kOp, "y", std::string("has dtype ") + Name(y.dtype()), std::string(Name(x.dtype())) + " as x");
  }
  if (!std::ranges::equal(y.sizes(), x.sizes())) {
    Fail(kOp, "y", "has shape " + y.ShapeString(), x.ShapeString());
  }
  mechanism::CheckContiguousRows(kOp, "y", y);
  mechanism::CheckWritable(kOp, "y", y, "x", x);
  mechanism::CheckWritable(kOp, "y", y, "positions", positions);
  p.y = WithBatch(y);
  p.positions = ReadPositions(positions);
  return p;
}

// The tables of a call, and the table of each row of positions.
struct Tables {
  std::vector<PhaseTable> tables;
  std::vector<size_t> of_row;
};

Tables MakeTables(const Problem& p, const RotaryOptions& options) {
  Tables result;
  for (int64_t row = 0; row < p.position_rows; ++row) {
    const int64_t* positions = p.positions.data() + row * p.T;
    const int64_t length = p.T == 0 ? 0 : *std::max_element(positions, positions + p.T) + 1;
    RotaryFrequencies f = ScaledRotaryFrequencies(p.dim, options.base, options.scaling, length);
    size_t found = 0;
    while (found < result.tables.size() && result.tables[found].frequencies() != f.frequencies) {
      ++found;
    }
    if (found == result.tables.size()) {
      result.tables.emplace_back(std::move(f.frequencies), f.attention_factor);
    }
    result.of_row.push_back(found);
    for (int64_t t = 0; t < p.T; ++t) result.tables[found].Prepare(positions[t]);
  }
  return result;
}

void Rotate(Context& ctx, const Problem& p, const Tables& tables) {
  const int64_t half = p.dim / 2;
  const auto size = static_cast<int64_t>(SizeOf(p.x.dtype()));
  const auto rest = static_cast<size_t>((p.D - p.dim) * size);
  const int64_t phase_bytes = PhaseRow::ScratchBytes(half);
  ctx.ReserveScratch(phase_bytes + positions::RotateScratchBytes(half));
  const int64_t blocks = (p.T + kBlockRows - 1) / kBlockRows;
  ctx.ParallelFor(p.B * blocks, [&](int64_t task, int worker) {
    const int64_t b = task / blocks, begin = task % blocks * kBlockRows;
    const int64_t end = std::min(begin + kBlockRows, p.T);
    const int64_t row = p.position_rows == 1 ? 0 : b;
    const int64_t* positions = p.positions.data() + row * p.T;
    char* const scratch = static_cast<char*>(ctx.Scratch(worker));
    PhaseRow phase(tables.tables[tables.of_row[static_cast<size_t>(row)]], scratch);
    for (int64_t t = begin; t < end; ++t) {
      phase.MoveTo(positions[t]);
      const char* x = p.x.as<char>() + (b * p.x.stride(0) + t * p.x.stride(1)) * size;
      char* y = p.y.as<char>() + (b * p.y.stride(0) + t * p.y.stride(1)) * size;
      positions::RotateRows(ctx.allowed_targets(), p.x.dtype(), p.pairs,
                            {.x = x,
                             .y = y,
                             .num_rows = p.H,
                             .x_stride = p.x.stride(2),
                             .y_stride = p.y.stride(2),
                             .half = half,
                             .cos = phase.cos(),
                             .sin = phase.sin(),
                             .sign = p.sign,
                             .scratch = scratch + phase_bytes});
      for (int64_t h = 0; h < p.H && rest > 0; ++h) {
        std::memcpy(y + (h * p.y.stride(2) + p.dim) * size, x + (h * p.x.stride(2) + p.dim) * size, rest);
      }
    }
  });
}

}  // namespace

void Rotary(Context& ctx, const ConstTensorView& x, const ConstTensorView& positions, RotaryPairs pairs,
            const RotaryOptions& options, const TensorView& y) {
  const Problem p = Check(x, positions, pairs, options, y);
  if (p.x.num_elements() == 0) return;         // whatever the other sizes
  const os::ScopedFloatControl float_control;  // for the tables
  const Tables tables = MakeTables(p, options);
  Rotate(ctx, p, tables);
}

}  // namespace heed
