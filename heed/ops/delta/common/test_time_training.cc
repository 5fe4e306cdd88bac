// The checks of calls of memories that are trained while they read.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "heed/mechanism/check_internal.h"
#include "heed/ops/delta/common/test_time_training_internal.h"

namespace heed::test_time_training {

using mechanism::CheckTensor;
using mechanism::Fail;

void CheckRows(const char* op, const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, bool data,
               Call& call) {
  mechanism::CheckFloat(op, "q", q, data);
  if (q.rank() != 4) Fail(op, "q", "has shape " + q.ShapeString(), "[B, T, H, K]");
  call.B = q.size(0);
  call.T = q.size(1);
  call.H = q.size(2);
  call.K = q.size(3);
  if (call.K < 1) Fail(op, "q", "has shape " + q.ShapeString(), "at least one channel");
  for (const auto& [name, view] : {std::pair{"q", q}, {"k", k}, {"v", v}}) {
    CheckTensor(op, name, view, q.sizes(), q.dtype(), data);  // the memory's error is that of k + LN(z) to v: V = K
    mechanism::CheckContiguousRows(op, name, view);
  }
}

void CheckOptions(const char* op, int64_t mini_batch, double eps, double scale, Call& call) {
  if (mini_batch < 1) Fail(op, "mini_batch", "is " + std::to_string(mini_batch), "at least 1");
  if (!std::isfinite(eps) || eps < 0) Fail(op, "eps", "is " + mechanism::Text(eps), "a finite number >= 0");
  if (!std::isfinite(scale)) Fail(op, "scale", "is " + mechanism::Text(scale), "a finite number");
  call.mini_batch = mini_batch;
  call.eps = eps;
  call.scale = scale;
}

void CheckFactor(const char* op, const char* name, const ConstTensorView& t, const mechanism::Axes& shape, DType dtype,
                 bool data) {
  const DType wide = mechanism::StateDType(dtype);
  CheckTensor(op, name, t, shape, t.present() && t.dtype() == wide ? wide : dtype, data);
}

void CheckPositions(const char* op, const ConstTensorView& positions, bool with_state, bool data, Call& call) {
  const size_t sequences = call.sequences.size();
  call.offsets.assign(sequences, 0);
  if (!positions.present()) return;
  if (positions.dtype() != DType::kI32 && positions.dtype() != DType::kI64) {
    Fail(op, "positions", std::string("has dtype ") + Name(positions.dtype()), "i32 or i64");
  }
  CheckTensor(op, "positions", positions, {static_cast<int64_t>(sequences)}, positions.dtype(), data);
  if (!data && positions.data() == nullptr) return;
  for (size_t n = 0; n < sequences; ++n) {
    const int64_t position =
        LoadAsInt64(positions.dtype(), positions.data(), static_cast<int64_t>(n) * positions.stride(0));
    const std::string name = "positions[" + std::to_string(n) + "]";
    if (position < 0) Fail(op, name.c_str(), "is " + std::to_string(position), "0 or more");
    if (position > 0 && !with_state) {
      Fail(op, name.c_str(), "is " + std::to_string(position), "0 without initial_state");
    }
    call.offsets[n] = position % call.mini_batch;
  }
}

}  // namespace heed::test_time_training
