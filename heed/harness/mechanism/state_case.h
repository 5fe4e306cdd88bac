// Cases of operations that have tensors and one state, and that no table describes.
#ifndef HEED_HARNESS_MECHANISM_STATE_CASE_H_
#define HEED_HARNESS_MECHANISM_STATE_CASE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/mechanism/check_internal.h"

namespace heed::mechanism {

// An input that has a gradient.
template <class BackwardInputs, class Gradients>
struct DifferentiableInput {
  const char* name;
  ConstTensorView BackwardInputs::* from;
  TensorView Gradients::* to;
};

// Arguments of one call with their memory, which copies share. The gradient of o is absent in a forward pass; in a
// step, the initial state is the state.
template <class BackwardInputs, class Options>
struct StateProblem {
  BackwardInputs in;
  Options options;
  std::string pass = "forward";
  std::vector<OutputSpec> outputs;
  std::vector<Buffer> memory;
  std::string note;

  TensorView Keep(const Buffer& buffer) {
    memory.push_back(buffer);
    return buffer.view();
  }
};

inline Shape SizesOf(const ConstTensorView& t) { return {t.sizes().begin(), t.sizes().end()}; }

// The number of sequences, each of which has a state.
template <class Problem>
int64_t NumSequences(const Problem& p) {
  return p.options.cu_seqlens.present() ? p.options.cu_seqlens.size(0) - 1 : p.in.q.size(0);
}

// Describes the outputs: the gradients of all inputs that are present, or o, which has the shape of v, and the state,
// whose axes begin with that of sequences.
template <class Problem, class Inputs>
void DescribeOutputs(const Inputs& inputs, const Shape& state_of_sequence, Problem& p) {
  p.outputs.clear();
  if (p.pass == "backward") {
    for (const auto& input : inputs) {
      const ConstTensorView& of = p.in.*input.from;
      if (of.present()) p.outputs.push_back({std::string("d") + input.name, of.dtype(), SizesOf(of), {}});
    }
    return;
  }
  Shape o = SizesOf(p.in.v), state = {NumSequences(p)};
  if (p.pass == "step") o.erase(o.begin() + 1);
  state.insert(state.end(), state_of_sequence.begin(), state_of_sequence.end());
  p.outputs = {{"o", p.in.v.dtype(), o, {}}, {"state", StateDType(p.in.q.dtype()), state, {}}};
}

// The gradients to write, from the results of a backward pass.
template <class Gradients, class Problem, class Inputs>
Gradients GradientsOf(const Problem& p, const Inputs& inputs, Views views) {
  Gradients out;
  size_t next = 0;
  for (const auto& input : inputs) {
    if ((p.in.*input.from).present()) out.*input.to = views[next++];
  }
  return out;
}

// o of one token as a tensor with an axis of tokens.
inline TensorView WithToken(const TensorView& o) {
  return {o.data(), o.dtype(), {o.size(0), 1, o.size(1), o.size(2)}, {o.stride(0), 0, o.stride(1), o.stride(2)}};
}

// A tensor whose second axis has one token, without that axis; an absent one stays absent.
inline ConstTensorView WithoutToken(const ConstTensorView& t) { return WithoutTokens("BT", t); }

void CopyElements(const ConstTensorView& from, const TensorView& to);

// A case with its title and bytes. `others` are arguments without a gradient, by name, beside those that all of these
// operations have.
using NamedViews = std::vector<std::pair<const char*, ConstTensorView>>;
Case DescribedCase(const std::string& op, const std::string& pass, const NamedViews& arguments,
                   const std::vector<OutputSpec>& outputs);
template <class Problem, class Inputs>
Case CaseOf(const char* op, const Problem& p, const Inputs& inputs, const NamedViews& others) {
  NamedViews arguments;
  for (const auto& input : inputs) arguments.emplace_back(input.name, p.in.*input.from);
  arguments.insert(arguments.end(), {{"d_o", p.in.d_o},
                                     {"d_state", p.in.d_final_state},
                                     {"lengths", p.options.lengths},
                                     {"starts", p.options.starts},
                                     {"cu_seqlens", p.options.cu_seqlens}});
  arguments.insert(arguments.end(), others.begin(), others.end());
  return DescribedCase(std::string(op) + " " + Name(p.in.q.dtype()), p.pass, arguments, p.outputs);
}

// Turns sums of magnitudes into tolerances: `share` of each, and the rounding of a result to its dtype. `dtype` is that
// of the call.
void AllowErrors(DType dtype, double share, const std::vector<OutputSpec>& outputs, Views expected, Views allowed);

// Fills log decays with exponentials of this mean, negated, and with -infinity with the probability `cuts`.
void FillDecays(const Buffer& buffer, uint64_t seed, double mean, double cuts = 0);

// Random sizes, layouts and sequences.
class RandomArguments {
 public:
  explicit RandomArguments(uint64_t seed) : random_(seed, 12), seed_(seed * 64) {}

 protected:
  bool Chance(double probability) { return random_.Chance(probability); }
  int64_t Integer(int64_t low, int64_t high) { return random_.Integer(low, high); }

  // Two axes in either order, gaps between rows, and columns too without `rows`; against either guard page.
  Buffer Layout(DType dtype, const Shape& sizes, bool rows);
  Buffer Normal(DType dtype, const Shape& sizes, bool rows) { return Layout(dtype, sizes, rows).FillNormal(++seed_); }

  // `packed`: cu_seqlens of that many sequences; else at times lengths and starts of B sequences.
  template <class Problem>
  void DrawSequences(bool packed, int64_t sequences, int64_t T, Problem& p) {
    if (packed) {
      p.options.cu_seqlens = p.Keep(Bounds(sequences, T));
    } else if (Chance(0.3) && sequences > 0) {
      const Buffer lengths(DType::kI32, Shape{sequences}), starts(DType::kI32, Shape{sequences});
      for (int64_t b = 0; b < sequences; ++b) {
        lengths.as<int32_t>()[b] = static_cast<int32_t>(Integer(0, T));
        starts.as<int32_t>()[b] = static_cast<int32_t>(Integer(0, T / 2));
      }
      p.options.lengths = p.Keep(lengths);
      p.options.starts = p.Keep(starts);
    }
  }

  Random random_;
  uint64_t seed_;

 private:
  Buffer Bounds(int64_t sequences, int64_t T);
};

}  // namespace heed::mechanism

#endif  // HEED_HARNESS_MECHANISM_STATE_CASE_H_
