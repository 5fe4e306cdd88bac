// Decays of any magnitude, which comparison with the reference of S4D rarely covers; each is exact.
#include "heed/ops/ssm/s4d/s4d.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "heed/harness/buffer.h"

namespace heed::s4d {
namespace {

// One step of a mode without an imaginary part: h becomes a from state 1 and input 0, b from state 0 and input 1.
TEST(S4dDiscretisation, IsExactForAnyDecay) {
  Context ctx(1);
  for (const double rate : {1e-12, 1e-6, 0.1, 1.0, 5.0, 40.0, 300.0}) {
    const Buffer u(DType::kF64, {2, 1}), log_dt(DType::kF64, {1}), log_A_real(DType::kF64, {1, 1});
    const Buffer A_imag(DType::kF64, {1, 1}), C(DType::kF64, {1, 1, 2});
    const Buffer state(DType::kF64, {2, 1, 1, 2}), o(DType::kF64, {2, 1});
    for (const Buffer* zero : {&log_dt, &A_imag, &C, &u, &state}) zero->FillConstant(0);
    log_A_real.FillConstant(std::log(rate));
    state.Set({0, 0, 0, 0}, 1);  // of the first sequence
    u.Set({1, 0}, 1);            // of the second
    StepInputs in;
    in.u = u.view();
    in.log_dt = log_dt.view();
    in.log_A_real = log_A_real.view();
    in.A_imag = A_imag.view();
    in.C = C.view();
    Step(ctx, in, {}, {state.view()}, o.view());
    const double a = std::exp(-rate), b = -std::expm1(-rate) / rate;
    EXPECT_NEAR(state.Get({0, 0, 0, 0}) / a, 1, 1e-13 * (1 + rate)) << rate;
    EXPECT_NEAR(state.Get({1, 0, 0, 0}) / b, 1, 1e-13) << rate;
  }
}

}  // namespace
}  // namespace heed::s4d
