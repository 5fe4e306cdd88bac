// A case: one problem of one mechanism, with what it should give and how close.
//
// Everything that must know all mechanisms (conformance tests, benchmarks,
// `heed list`, `verify` and `bench`) asks AllOps() and sees only this file.
//
// Agreement with the build: heed_add_op(<family>/<name>) promises that
// <name>_case.cc defines `OpEntry heed::<name>::Entry()`. CMake writes the source
// of AllOps(), which declares and calls them in the order of ops/CMakeLists.txt.
#ifndef HEED_HARNESS_CASE_H_
#define HEED_HARNESS_CASE_H_

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/harness/buffer.h"

namespace heed {

namespace recurrent {
struct Mechanism;  // ops/mechanism/recurrent_case.h
}

// B sequences, Tq queries, Tk keys, Hq query and Hkv key heads, D and Dv key and
// value channels. A recurrence uses T = Tq, H = Hq, K = D, V = Dv.
struct Sizes {
  int64_t B = 1, Tq = 1, Tk = 1, Hq = 1, Hkv = 1, D = 1, Dv = 1;
};

// "B2_T7_H3_D20", with x between what differs: "B2_T7x9_H4x2_D20x36".
std::string ToString(const Sizes& sizes);
std::ostream& operator<<(std::ostream& os, const Sizes& sizes);

// One output of a case.
struct OutputSpec {
  std::string name;  // "o", "lse", "dq"
  DType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // row-major if empty
};

// A problem with its inputs inside; copies share them. `outputs` lists what
// `run` writes. `reference` writes the same outputs in f64, and if asked for it
// the largest allowed |result - expected| of every element.
struct Case {
  std::string title;  // shapes and options, enough to build the problem by hand
  std::string pass = "forward";
  std::vector<OutputSpec> outputs;

  std::function<void(Context&, std::span<const TensorView> outputs)> run;
  std::function<void(std::span<const TensorView> expected,
                     std::span<const TensorView> tolerance)>
      reference;  // `tolerance` may be empty

  // What is timed: the work of `run` without what only a comparison needs, on outputs of an
  // earlier run or of its own. Null where that is `run`.
  std::function<void(Context&, std::span<const TensorView> outputs)> timed;

  double flops = 0;  // of the mathematics, not of the kernel
  double bytes = 0;  // inputs read once, outputs written once
  double pairs = 0;  // kept (query, key) pairs over all heads; 0 if none exist
};

// What make_case is asked for. `variant` is a '+'-separated list of words, each
// one of OpEntry::variants, or that with another value: any number, any expression of a pattern.
struct CaseRequest {
  Sizes sizes;
  DType dtype = DType::kF32;
  uint64_t seed = 1;
  std::string pass = "forward";
  std::string variant;
};

// One argument of a mechanism as `heed run` finds it in a file: its name in Python, and a
// letter for each axis, "BTHK". A file may leave out B. Where H is fewer heads than the first
// argument has, each serves several; G are key heads that stay what they are.
struct InputSpec {
  std::string name, axes;
  bool optional = false;
  bool wide = false;  // f32 beside inputs of 16 bits
};

using TensorMap = std::map<std::string, ConstTensorView>;

// A call on tensors of somebody else, with every option but `scale` at its default.
struct TensorCall {
  std::vector<OutputSpec> outputs = {};  // o, and what the mechanism remembers of these tokens
  std::function<void(Context&, std::span<const TensorView> outputs)> run = {};
  bool causal = true;  // no token sees those behind it
  std::string kernel = {}, target = {}, why = {};
  double flops = 0;             // of the forward pass
  int64_t workspace_bytes = 0;  // of the pass that reserves most
};

// The weights w_ts with which a mechanism, at its defaults, sums values, where q and k of a
// head say them: exp((t - s) log_decay) f, with f, by `form`,
//
//   identity  x = scale <q_t, k_s>
//   elu1      scale <phi(q_t), phi(k_s)>, phi(x) = x + 1 if x > 0, else exp(x)
//   taylor    1 + x + x^2 / 2
//
// and divided by the sum of them plus eps if normalised.
struct ImpliedWeights {
  std::string form;
  double scale = 1, log_decay = 0;
  bool normalize = false;
  double eps = 0;
  bool sees_all = false;  // of every key, where the attention beside it is not causal
};

// One mechanism.
struct OpEntry {
  std::string name = {};                 // folder, namespace, CLI and Python name
  std::string family = {};               // "exact", "sparse", "linear", "gated", "ssm"
  std::vector<std::string> passes = {};  // of "forward", "backward", "step"
  std::vector<DType> dtypes = {};        // that have kernels
  std::vector<std::string> variants = {};
  std::string flops = {}, bytes = {}, state = {};  // formulas as text, in the letters of Sizes

  // N(0, 1) inputs, [B, T, H, D] contiguous, aligned, no option beyond the
  // variant's: cheap to build at any size. Throws InvalidArgument.
  std::function<Case(const CaseRequest& request)> make_case = {};

  // A small problem with random sizes, layouts and options: a function of the
  // seed alone. Its buffers begin or end at inaccessible pages.
  std::function<Case(DType dtype, uint64_t seed)> random_case = {};

  // Mechanisms on the recurrence engine set it, for the tests of what they share; others leave it null.
  const recurrent::Mechanism* recurrent = nullptr;

  // What `heed run`, `heed compare` and `heed advise` call: tensors by the names of `inputs`, those that are
  // optional or not, and all of them alive until the call is gone. Throws as the mechanism's
  // Forward. Pointers may be null where a call is only planned. Null where no verb has it.
  std::vector<InputSpec> inputs = {};
  using CallOn = std::function<TensorCall(const Context& ctx, const TensorMap& tensors, std::optional<double> scale)>;
  CallOn call = {};
  std::string keywords = {};  // what `call` says besides in Python, ", window=512"
  // The forward pass and the gradients of all tensors in one call, for the gradient "d_o" of o among the
  // tensors; gradients are the last of the outputs. Null where there is no backward pass.
  CallOn train = {};
  // One token, T = 1 in all tensors, of which `run` advances the states that are among the outputs and must
  // hold those of the tokens before. Throws InvalidArgument where a call with default options has none. Null
  // where there is no step.
  CallOn step = {};
  // Settings beside the defaults that have lines of their own in `heed compare`, by what is different.
  std::map<std::string, CallOn> settings = {};

  // What `heed view` draws beside exact attention; null where there are no such weights.
  ImpliedWeights (*weights)(int64_t head, int64_t channels) = nullptr;
};

// All mechanisms, in the order of the table of contents.
const std::vector<OpEntry>& AllOps();

// The one of that name. Throws InvalidArgument that lists the names.
OpEntry FindOp(std::string_view name);

// A result beside what was expected. An element fails if its error exceeds its
// tolerance, or if one side is NaN or infinite and the other is not the same.
struct Comparison {
  bool ok = true;
  double max_error = 0;            // largest |result - expected| of all elements
  std::vector<double> max_errors;  // of each output
  double worst_ratio = 0;          // largest error / tolerance; infinite for a bad NaN
  double error = 0;                // of the element with the worst ratio
  double tolerance = 0;            // of the same element
  std::string where;               // the same element: "o[0,3,1,7]"
  std::string message;             // one line; what, where, got, expected; title if !ok
};

// What the reference of a case says, in the order of its outputs: most of the seconds of a
// comparison, so worth keeping where several results are compared.
struct Expected {
  std::vector<Buffer> values, tolerance;  // f64
};
Expected ExpectedOf(const Case& c);

// Runs the case into outputs that start as NaN, and compares with its reference.
Comparison Compare(const Case& c, Context& ctx);
Comparison Compare(const Case& c, Context& ctx, const Expected& expected);

// Compares results that are there already, in the order of c.outputs.
Comparison CompareResults(const Case& c, std::span<const ConstTensorView> results);
Comparison CompareResults(const Case& c, std::span<const ConstTensorView> results, const Expected& expected);

}  // namespace heed

#endif  // HEED_HARNESS_CASE_H_
