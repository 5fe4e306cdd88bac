// The definition of a mechanism for the scan engine, and its passes.
#ifndef HEED_MECHANISM_SCANNING_INTERNAL_H_
#define HEED_MECHANISM_SCANNING_INTERNAL_H_

#include <cstdint>
#include <string_view>

#include "heed/core/context.h"
#include "heed/engines/scan/problem.h"
#include "heed/mechanism/call_internal.h"
#include "heed/mechanism/passes_internal.h"
#include "heed/mechanism/segments_internal.h"
#include "heed/mechanism/scanning.h"

namespace heed::scanning {

using mechanism::Arguments;
using mechanism::AxisSizes;
using mechanism::Results;
using mechanism::Role;
using mechanism::StateTensor;
using mechanism::Tensor;
using mechanism::With;

struct Call;
struct Definition;

// Kernels of a mechanism that the scan engine does not compute. Results are checked; a step has one token.
struct Kernels {
  void (*forward)(const char* op, Context& ctx, const Definition& definition, const Call& call, const Arguments& in,
                  const Results& out);
  void (*backward)(const char* op, Context& ctx, const Definition& definition, const Call& call, const Arguments& in,
                   const Results& out);
  void (*step)(Context& ctx, const Definition& definition, const Call& call, const Arguments& in, const Results& out);
  int64_t (*workspace)(const Context& ctx, const Definition& definition, const Call& call, const Arguments& in,
                       bool backward);
  void (*explain)(const Arguments& in, Explanation& e);  // sets kernel and why
};

// A mechanism: its table, in the letters of scanning.h, and its options.
struct Definition {
  using Call = scanning::Call;
  using Options = scanning::Options;

  mechanism::Table table;
  scan::Rule rule = scan::Rule::kDecay;
  double flops = 0;                  // per token, channel and state, or per tap of a separate kernel; 0 for rows of
                                     // taps
  const Kernels* kernels = nullptr;  // null: those of the engine
  // Options of single mechanisms.
  bool softplus = false, silu = false;
  double c = 0;
  bool bilinear = false;
  scan::Method method = scan::Method::kAuto;

  bool has_state() const { return !table.states.empty(); }
  const char* o_axes() const { return table.tensors[0].axes; }
};

// A checked call on the scan engine.
struct Call : mechanism::Call {
  using Definition = scanning::Definition;
  using Options = scanning::Options;

  static std::string AxisName(char letter) { return letter == 'w' ? "W - 1" : std::string(1, letter); }
  static Options OptionsOfStep(const Options&) { return {}; }  // no option has an effect
  static void CheckStep(const char* /*op*/, const Definition& /*definition*/) {}

  void Check(const char* op, const Context* checks, const Definition& definition, const Arguments& in,
             const Options& options, bool data);
  void CheckLayout(const char* op, const Context* checks, const char* name, const ConstTensorView& t,
                   std::string_view axes) const;
  void CheckStateLayout(const char* /*op*/, const char* /*name*/, const ConstTensorView& /*t*/) const {}
  DType GradientDType(const Tensor& /*tensor*/, const ConstTensorView& input) const { return input.dtype(); }

  void Forward(const char* op, Context& ctx, const Definition& definition, const Arguments& in, const Results& out);
  void Backward(const char* op, Context& ctx, const Definition& definition, const Arguments& in, const Results& out);
  void Step(const char* op, Context& ctx, const Definition& definition, const Arguments& in, const Results& out);
  int64_t ForwardBytes(const char* op, const Context& ctx, const Definition& definition, const Arguments& in) const;
  int64_t BackwardBytes(const char* op, const Context& ctx, const Definition& definition, const Arguments& in) const;
  void Explain(const char* op, const Context& ctx, const Definition& definition, const Arguments& in,
               Explanation& e) const;
  mechanism::Division DivisionOf(const Definition& definition, const Arguments& in) const;

  scan::Problem problem;
  bool gathers_allowed = true;  // kernels of a mechanism's own check layouts themselves

 private:
  void CheckSizes(const char* op, const Definition& definition, const Arguments& in);
  void AddOtherTokens();
};

using Passes = mechanism::Passes<Definition>;

// Flops of one sequence of `tokens` tokens.
double FlopsOf(const Definition& definition, const AxisSizes& sizes, int64_t tokens, bool backward);

}  // namespace heed::scanning

extern template struct heed::mechanism::Passes<heed::scanning::Definition>;  // in scanning.cc

#endif  // HEED_MECHANISM_SCANNING_INTERNAL_H_
