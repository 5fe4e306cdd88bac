// Problems of memories that are trained while they read, as far as these share inputs and options. Form is the
// mechanism::Form of one.
#ifndef HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_CASE_H_
#define HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_CASE_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include "heed/core/dtype.h"
#include "heed/core/tensor.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/harness/mechanism/state_case.h"
#include "heed/mechanism/check_internal.h"

namespace heed::test_time_training {

using mechanism::Shape;
using mechanism::Views;

// The mechanism's references, and their bounds as the tolerance. The running error of the bounds is the kernel's too:
// sums count in any order, and differences by the magnitudes of both sides. The kernel reads the memory before a chunk
// and the tokens of the chunk where the reference reads the memory before a token, in terms of the same magnitudes as
// long as gates are in [0, 1]; the factor of 2 is for its own operations, such as products of factors.
template <class Form>
void RunReference(const Form& form, const typename Form::Problem& p, Views expected, Views tolerance) {
  const bool backward = p.pass == "backward";
  if (backward) {
    BackwardReference(p.in, p.options, mechanism::GradientsOf(form, p, expected));
  } else {
    Reference(p.in, p.options, mechanism::OutputsOf(form, p, expected));
  }
  if (tolerance.empty()) return;
  if (backward) {
    BackwardReferenceBounds(p.in, p.options, mechanism::GradientsOf(form, p, tolerance));
  } else {
    ReferenceBounds(p.in, p.options, mechanism::OutputsOf(form, p, tolerance));
  }
  const double u = p.in.q.dtype() == DType::kF64 ? 0x1p-53 : 0x1p-24;
  mechanism::AllowErrors(p.in.q.dtype(), 2 * u, p.outputs, expected, tolerance);
}

// A step's flops are those of one token and head. `note` are the options that the mechanism alone has.
template <class Form>
Case ToCase(const Form& form, const typename Form::Problem& problem, double step_flops, const std::string& note = "") {
  const auto p = std::make_shared<const typename Form::Problem>(problem);
  Case c = mechanism::CaseOf(form, p);
  c.title += " mini_batch=" + std::to_string(p->options.mini_batch) + " eps=" + std::to_string(p->options.eps) +
             " scale=" + std::to_string(p->options.scale) + note + " " + p->note;
  c.reference = [&form, p](Views expected, Views tolerance) { RunReference(form, *p, expected, tolerance); };
  if (p->pass == "step") {
    c.flops = static_cast<double>(p->in.q.size(0) * p->in.q.size(2)) * step_flops;
  } else {  // the backward pass makes the states again
    c.flops = (p->pass == "forward" ? 1 : 3) * Explain(Context(1), p->in, p->options).flops;
  }
  return c;
}

// A problem for make_case. The constructor makes q, k, v, weight and bias; the caller adds other inputs.
template <class Form>
class FixedProblem {
 public:
  FixedProblem(const Form& form, const CaseRequest& request)
      : form_(form), request_(request), seed_(request.seed * 16), T_(request.pass == "step" ? 1 : request.sizes.Tq) {
    mechanism::CheckPass(form, request);
    const Sizes& s = request.sizes;
    p.pass = request.pass;
    p.note = request.variant;
    p.in.q = Rows(mechanism::FillRows);
    p.in.k = Rows(mechanism::FillRows);
    p.in.v = Rows(Scaled(1));
    p.in.weight = Tensor(request.dtype, {s.Hq, s.D}, Uniform(0.5, 1.5));
    p.in.bias = Tensor(request.dtype, {s.Hq, s.D}, Scaled(0.1));
  }

  ConstTensorView Tokens(double low, double high) {
    return Tensor(request_.dtype, {request_.sizes.B, T_, request_.sizes.Hq}, Uniform(low, high));
  }
  ConstTensorView State(int64_t parts, int64_t rows) {
    const Sizes& s = request_.sizes;
    return Tensor(mechanism::StateDType(request_.dtype), {s.B, s.Hq, parts, rows, s.D}, Scaled(0.5));
  }

  // Adds what remains.
  void Finish() {
    const int64_t B = request_.sizes.B;
    if (request_.pass == "step") {
      const Buffer positions(DType::kI64, Shape{B}, Placement::kAligned);
      std::fill_n(positions.as<int64_t>(), B, request_.sizes.Tk);
      p.options.positions = p.Keep(positions);
    }
    if (mechanism::Words(request_.variant).Has("long_batches")) p.options.mini_batch = 64;
    if (request_.pass == "backward") p.in.d_o = Rows(Scaled(1));
    mechanism::DescribeOutputs(form_, p);
  }

  typename Form::Problem p;

 private:
  template <class Fill>
  ConstTensorView Tensor(DType dtype, const Shape& sizes, const Fill& fill) {
    const Buffer buffer(dtype, sizes, Placement::kAligned);
    fill(buffer, ++seed_);
    return p.Keep(buffer);
  }
  template <class Fill>
  ConstTensorView Rows(const Fill& fill) {
    return Tensor(request_.dtype, {request_.sizes.B, T_, request_.sizes.Hq, request_.sizes.D}, fill);
  }
  static auto Uniform(double low, double high) {
    return [low, high](const Buffer& buffer, uint64_t seed) { mechanism::FillUniform(buffer, seed, low, high); };
  }
  static auto Scaled(double scale) {
    return [scale](const Buffer& buffer, uint64_t seed) { mechanism::FillScaled(buffer, seed, scale); };
  }

  const Form& form_;
  const CaseRequest& request_;
  uint64_t seed_;
  const int64_t T_;
};

// A problem for random_case. The constructor makes q, k, v, weight and bias; the caller adds other inputs, between
// them by DrawSequences() the sequences, and the state by AddState().
template <class Form>
class RandomProblem : public mechanism::RandomArguments {
 public:
  RandomProblem(const Form& form, DType dtype, uint64_t seed) : RandomArguments(seed), form_(form), dtype_(dtype) {
    p.note = "seed=" + std::to_string(seed);
    packed_ = Chance(0.25);
    B_ = packed_ ? 1 : Chance(0.03) ? 0 : Integer(1, 2);
    p.options.mini_batch = random_.template Pick<int64_t>({1, 2, 3, 5, 8, 16, 16, 16, 16, 19, 32, 40, 1000});
    // Rounding errors grow with the number of mini-batches.
    const int64_t most = std::min<int64_t>(8 * p.options.mini_batch, 70);
    T_ = Chance(0.03) ? 0 : Integer(1, most);
    H_ = Integer(1, 2);
    N_ = packed_ ? Integer(1, 4) : B_;
    K_ = Chance(0.9) ? Integer(1, 20) : random_.template Pick<int64_t>({31, 32, 33});
    for (ConstTensorView* rows : {&p.in.q, &p.in.k}) {
      const Buffer buffer = Layout(dtype_, {B_, T_, H_, K_}, true);
      mechanism::FillRows(buffer, ++seed_);
      *rows = p.Keep(buffer);
    }
    p.in.v = Tensor(dtype_, {B_, T_, H_, K_}, true, 1);
    p.in.weight = Uniform({H_, K_}, 0.5, 1.5);
    p.in.bias = Tensor(AnyDType(), {H_, K_}, false, 0.3);
  }

  using RandomArguments::Chance;
  template <class T>
  T Pick(std::initializer_list<T> values) {
    return random_.template Pick<T>(values);
  }
  ConstTensorView Tokens(double low, double high) { return Uniform({B_, T_, H_}, low, high); }
  int64_t channels() const { return K_; }

  // Draws the sequences, and eps. Returns whether there is a state: without one, rows of the first mini-batch have no
  // variance.
  bool DrawSequences() {
    RandomArguments::DrawSequences(packed_, N_, T_, p);
    const bool with_state = Chance(0.7);
    p.options.eps = with_state ? Pick({1e-6, 1e-2, 0.3}) : Pick({1e-2, 0.3});
    return with_state;
  }
  void AddState(int64_t parts, int64_t rows) {
    p.in.initial_state = State(parts, rows, 0.5);
    if (!Chance(0.5)) return;
    const Buffer positions(Chance(0.5) ? DType::kI32 : DType::kI64, Shape{N_});
    for (int64_t n = 0; n < N_; ++n) positions.Set({n}, static_cast<double>(Integer(0, 40)));
    p.options.positions = p.Keep(positions);
  }
  // Adds what remains.
  void Finish(int64_t parts, int64_t rows) {
    if (Chance(0.5)) p.options.scale = Pick({0.3, -1.0, 2.0});
    if (Chance(0.5)) {
      p.pass = "backward";
      const double loss = dtype_ == DType::kF16 ? 0x1p-6 : 1;  // keeps gradients in the range of f16
      p.in.d_o = Tensor(dtype_, {B_, T_, H_, K_}, true, loss);
      if (Chance(0.5)) p.in.d_final_state = State(parts, rows, loss);
    }
    mechanism::DescribeOutputs(form_, p);
  }

  typename Form::Problem p;

 private:
  DType AnyDType() { return Chance(0.5) ? dtype_ : mechanism::StateDType(dtype_); }
  ConstTensorView Uniform(const Shape& sizes, double low, double high) {
    const Buffer buffer = Layout(AnyDType(), sizes, false);
    mechanism::FillUniform(buffer, ++seed_, low, high);
    return p.Keep(buffer);
  }
  ConstTensorView Tensor(DType dtype, const Shape& sizes, bool rows, double scale) {
    const Buffer buffer = Layout(dtype, sizes, rows);
    mechanism::FillScaled(buffer, ++seed_, scale);
    return p.Keep(buffer);
  }
  ConstTensorView State(int64_t parts, int64_t rows, double scale) {
    return Tensor(mechanism::StateDType(dtype_), {N_, H_, parts, rows, K_}, false, scale);
  }

  const Form& form_;
  const DType dtype_;
  bool packed_ = false;
  int64_t B_ = 0, T_ = 0, H_ = 0, N_ = 0, K_ = 0;  // N: sequences
};

}  // namespace heed::test_time_training

#endif  // HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_CASE_H_
