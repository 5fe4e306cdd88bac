// Sinusoidal position encoding.
#include "heed/ops/positions/sinusoidal.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/positions/phase_table_internal.h"

namespace heed {
namespace {

using mechanism::Fail;
using positions::PhaseRow;
using positions::PhaseTable;

constexpr char kOp[] = "sinusoidal";
constexpr int64_t kBlockRows = 32;  // rows per task

// One more than pairs of columns if D is odd.
std::vector<double> Frequencies(SinusoidalOrder order, int64_t D) {
  std::vector<double> w(static_cast<size_t>((D + 1) / 2));
  for (size_t i = 0; i < w.size(); ++i) {
    const double exponent = order == SinusoidalOrder::kInterleaved
                                ? 2 * static_cast<double>(i) / static_cast<double>(D)
                                : static_cast<double>(i) / static_cast<double>(std::max<int64_t>(D / 2 - 1, 1));
    w[i] = std::pow(10000.0, -exponent);
  }
  return w;
}

}  // namespace

void Sinusoidal(Context& ctx, SinusoidalOrder order, const TensorView& table) {
  mechanism::CheckWritable(kOp, "table", table, "nothing", {});
  if (table.rank() != 2 || table.size(1) < 1) {
    Fail(kOp, "table", "has shape " + table.ShapeString(), "[T, D] with D >= 1");
  }
  if (table.dtype() != DType::kF32) Fail(kOp, "table", std::string("has dtype ") + Name(table.dtype()), "f32");
  const int64_t T = table.size(0), D = table.size(1), half = D / 2;
  if (T == 0) return;

  const os::ScopedFloatControl float_control;  // for the tables
  PhaseTable phases(Frequencies(order, D), 1);
  for (int64_t t = 0; t < std::min(T, positions::kLowPositions); ++t) {
    phases.Prepare(t);
  }
  const bool interleaved = order == SinusoidalOrder::kInterleaved;
  const int64_t column = table.stride(1);
  const int64_t pair_step = (interleaved ? 2 : 1) * column;
  const int64_t to_cos = (interleaved ? 1 : half) * column;
  ctx.ReserveScratch(PhaseRow::ScratchBytes(static_cast<int64_t>(phases.size())));
  ctx.ParallelFor((T + kBlockRows - 1) / kBlockRows, [&](int64_t task, int worker) {
    PhaseRow phase(phases, ctx.Scratch(worker));
    const int64_t end = std::min((task + 1) * kBlockRows, T);
    for (int64_t t = task * kBlockRows; t < end; ++t) {
      phase.MoveTo(t);
      float* row = table.as<float>() + t * table.stride(0);
      for (int64_t i = 0; i < half; ++i) {
        row[i * pair_step] = static_cast<float>(phase.sin()[i]);
        row[i * pair_step + to_cos] = static_cast<float>(phase.cos()[i]);
      }
      if (D % 2 != 0) {
        row[(D - 1) * column] = static_cast<float>(phase.sin()[half]);
      }
    }
  });
}

}  // namespace heed
