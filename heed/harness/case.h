// A case: one problem of one mechanism, with its expected results and their tolerance.
//
// Everything that must know all mechanisms (conformance tests, benchmarks, `heed list`, `verify` and `bench`) calls
// AllOps() and depends on this file only.
//
// Contract with the build: heed_add_op(<family>/<name>) promises that <name>_case.cc defines `OpEntry
// heed::<name>::Entry()`. CMake writes the source of AllOps(), which declares and calls them in the order of
// ops/CMakeLists.txt.
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
struct Mechanism;  // harness/mechanism/recurrent_case.h
}

// B sequences, Tq queries, Tk keys, Hq query and Hkv key heads, D key and Dv value channels. A recurrence uses T = Tq,
// H = Hq, K = D, V = Dv.
struct Sizes {
  int64_t B = 1, Tq = 1, Tk = 1, Hq = 1, Hkv = 1, D = 1, Dv = 1;
};

// "B2_T7_H3_D20", with x between sizes that differ: "B2_T7x9_H4x2_D20x36".
std::string ToString(const Sizes& sizes);
std::ostream& operator<<(std::ostream& os, const Sizes& sizes);

// One output of a case.
struct OutputSpec {
  std::string name;  // "o", "lse", "dq"
  DType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // row-major if empty
};

// A problem that owns its inputs; copies share them. `outputs` lists the tensors that `run` writes. `reference` writes
// the same outputs in f64 and, if `tolerance` is not empty, the largest allowed |result - expected| of every element.
struct Case {
  std::string title;  // shapes and options, enough to build the problem by hand
  std::string pass = "forward";
  std::vector<OutputSpec> outputs;

  std::function<void(Context&, std::span<const TensorView> outputs)> run;
  std::function<void(std::span<const TensorView> expected,
                     std::span<const TensorView> tolerance)>
      reference;  // `tolerance` may be empty

  // The function to time: the work of `run` without the parts that only a comparison needs, on outputs of an earlier
  // run or on its own. Null if it is `run`.
  std::function<void(Context&, std::span<const TensorView> outputs)> timed;

  double flops = 0;  // counted in the mathematics, not in the kernel
  double bytes = 0;  // inputs read once, outputs written once
  double pairs = 0;  // kept (query, key) pairs over all heads; 0 if none exist
};

// The request to make_case. `variant` is a '+'-separated list of words, each one of OpEntry::variants, or such a word
// with another value: any number, any expression of a pattern.
struct CaseRequest {
  Sizes sizes;
  DType dtype = DType::kF32;
  uint64_t seed = 1;
  std::string pass = "forward";
  std::string variant;
};

// One argument of a mechanism as `heed run` finds it in a file: its name in Python, and a letter for each axis, "BTHK".
// A file may leave out B. If H is fewer heads than the first argument has, each head serves several; the number of key
// heads G stays unchanged.
struct InputSpec {
  std::string name, axes;
  bool optional = false;
  bool wide = false;  // f32 also with inputs of 16 bits
};

using TensorMap = std::map<std::string, ConstTensorView>;

// A call on the caller's tensors, with every option but `scale` at its default.
struct TensorCall {
  std::vector<OutputSpec> outputs = {};  // o, and the state after these tokens
  std::function<void(Context&, std::span<const TensorView> outputs)> run = {};
  bool causal = true;  // no token sees later ones
  std::string kernel = {}, target = {}, why = {};
  double flops = 0;             // forward pass
  int64_t workspace_bytes = 0;  // maximum over the passes
};

// The weights w_ts with which a mechanism, at its default options, sums values, if they follow from q and k of a head:
// exp((t - s) log_decay) f, with f given by `form`,
//
//   identity  x = scale <q_t, k_s>
//   elu1      scale <phi(q_t), phi(k_s)>, phi(x) = x + 1 if x > 0, else exp(x)
//   taylor    1 + x + x^2 / 2
//
// and divided by their sum plus eps if normalised.
struct ImpliedWeights {
  std::string form;
  double scale = 1, log_decay = 0;
  bool normalize = false;
  double eps = 0;
  bool sees_all = false;  // sees every key if the attention that it is compared with is not causal
};

// A mechanism in the harness.
struct OpEntry {
  std::string name = {};                 // folder, namespace, CLI and Python name
  std::string family = {};               // "exact", "sparse", "linear", "gated", "ssm"
  std::vector<std::string> passes = {};  // some of "forward", "backward", "step"
  std::vector<DType> dtypes = {};        // dtypes that have kernels
  std::vector<std::string> variants = {};
  std::string flops = {}, bytes = {}, state = {};  // formulas as text, in the letters of Sizes

  // Inputs are N(0, 1), [B, T, H, D] contiguous and aligned, without options beyond the variant's: cheap to build at
  // any size. Throws InvalidArgument.
  std::function<Case(const CaseRequest& request)> make_case = {};

  // A small problem with random sizes, layouts and options, which depends on the seed alone. Its buffers begin or end
  // at inaccessible pages.
  std::function<Case(DType dtype, uint64_t seed)> random_case = {};

  // Set by mechanisms on the recurrence engine, for the tests of their common behaviour; null for others.
  const recurrent::Mechanism* recurrent = nullptr;

  // The function that `heed run`, `heed compare` and `heed advise` call on tensors by the names of `inputs`, optional
  // ones or not, all of which must outlive the call. It throws as the mechanism's Forward does. Pointers may be null if
  // a call is only planned. Null if no verb supports the mechanism.
  std::vector<InputSpec> inputs = {};
  using CallOn = std::function<TensorCall(const Context& ctx, const TensorMap& tensors, std::optional<double> scale)>;
  CallOn call = {};
  std::string keywords = {};  // further arguments of `call` in Python, ", window=512"
  // The forward pass and the gradients of all tensors in one call, given the gradient "d_o" of o among the tensors.
  // Gradients are the last outputs. Null if there is no backward pass.
  CallOn train = {};
  // One token: T = 1 in all tensors. `run` advances the states, which are among the outputs and must hold those of the
  // previous tokens. Throws InvalidArgument if a call with default options has no step. Null if the mechanism has none.
  CallOn step = {};
  // Settings other than the defaults that have their own lines in `heed compare`, by a name for the difference.
  std::map<std::string, CallOn> settings = {};

  // The weights that `heed view` draws beside exact attention; null if there are none.
  ImpliedWeights (*weights)(int64_t head, int64_t channels) = nullptr;
};

// All mechanisms, in the order of the table of contents.
const std::vector<OpEntry>& AllOps();

// The mechanism of this name. Throws InvalidArgument that lists the names.
OpEntry FindOp(std::string_view name);

// A result compared with its expected value. An element fails if its error exceeds its tolerance, or if one side is NaN
// or infinite and the other is not equal to it.
struct Comparison {
  bool ok = true;
  double max_error = 0;            // largest |result - expected| over all elements
  std::vector<double> max_errors;  // the same for each output
  double worst_ratio = 0;          // largest error / tolerance; infinite for a bad NaN
  double error = 0;                // of the element with the worst ratio
  double tolerance = 0;            // of the same element
  std::string where;               // the same element: "o[0,3,1,7]"
  std::string message;             // one line: output, element, got, expected; title if !ok
};

// The results of a case's reference, in the order of its outputs. Computing them takes most of the time of a
// comparison, so it pays to keep them if several results are compared.
struct Expected {
  std::vector<Buffer> values, tolerance;  // f64
};
Expected ExpectedOf(const Case& c);

// Runs the case into outputs that start as NaN, and compares them with its reference.
Comparison Compare(const Case& c, Context& ctx);
Comparison Compare(const Case& c, Context& ctx, const Expected& expected);

// Compares existing results, in the order of c.outputs.
Comparison CompareResults(const Case& c, std::span<const ConstTensorView> results);
Comparison CompareResults(const Case& c, std::span<const ConstTensorView> results, const Expected& expected);

}  // namespace heed

#endif  // HEED_HARNESS_CASE_H_
