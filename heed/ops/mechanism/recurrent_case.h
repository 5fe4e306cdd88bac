// Problems of recurrent mechanisms: what their cases are made of.
#ifndef HEED_OPS_MECHANISM_RECURRENT_CASE_H_
#define HEED_OPS_MECHANISM_RECURRENT_CASE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/mechanism/recurrent.h"
#include "heed/ops/mechanism/recurrent_internal.h"
#include "heed/ops/mechanism/recurrent_reference_internal.h"

namespace heed::recurrent {

// One mechanism, with options of its own bound.
struct Mechanism {
  std::string name;
  Definition definition;
  std::function<void(Context&, const Inputs&, const Options&, const Outputs&)> forward;
  std::function<void(Context&, const BackwardInputs&, const Options&, const Gradients&)>
      backward;
  std::function<void(const Inputs&, const Options&, const Outputs&)> reference;
  std::function<void(const BackwardInputs&, const Options&, const Gradients&)>
      backward_reference;
  std::function<void(Context&, const StepInputs&, const Options&, const State&,
                     const TensorView&)>
      step;
  std::function<ReferenceMath(const Inputs&, const Options&)> math = {};
  std::string options = {};  // for titles

  // Null where the definition says it all.
  std::function<Explanation(const Context&, const Inputs&, const Options&)> explain = {};
  // Of mechanisms whose mathematics is not that of `math`: the allowed error of each output.
  std::function<void(const Inputs&, const Options&, const Outputs& expected,
                     const Outputs& tolerance)>
      tolerance = {};
  std::function<void(const BackwardInputs&, const Options&, const Gradients& expected,
                     const Gradients& tolerance)>
      backward_tolerance = {};
};

// One whose functions take options of its own kind: with these.
template <class Own>
struct OwnFunctions {
  void (*forward)(Context&, const Inputs&, const Own&, const Outputs&);
  void (*backward)(Context&, const BackwardInputs&, const Own&, const Gradients&);
  void (*reference)(const Inputs&, const Own&, const Outputs&);
  void (*backward_reference)(const BackwardInputs&, const Own&, const Gradients&);
  void (*step)(Context&, const StepInputs&, const Own&, const State&, const TensorView&);
  ReferenceMath (*math)(const Inputs&, const Own&);
};
template <class Own>
Mechanism Bound(const char* name, const Definition& definition, const Own& own,
                const OwnFunctions<Own>& f) {
  Mechanism m;
  m.name = name;
  m.definition = definition;
  m.forward = [=](Context& ctx, const Inputs& in, const Options& options,
                  const Outputs& out) { f.forward(ctx, in, With(own, options), out); };
  m.backward = [=](Context& ctx, const BackwardInputs& in, const Options& options,
                   const Gradients& out) { f.backward(ctx, in, With(own, options), out); };
  m.reference = [=](const Inputs& in, const Options& options, const Outputs& out) {
    f.reference(in, With(own, options), out);
  };
  m.backward_reference = [=](const BackwardInputs& in, const Options& options,
                             const Gradients& out) {
    f.backward_reference(in, With(own, options), out);
  };
  m.step = [=](Context& ctx, const StepInputs& in, const Options& options,
               const State& state, const TensorView& o) {
    f.step(ctx, in, With(own, options), state, o);
  };
  m.math = [=](const Inputs& in, const Options& options) {
    return f.math(in, With(own, options));
  };
  return m;
}

// Variants that every one of them has.
inline const std::vector<std::string> kVariants = {"state", "lengths=62", "reverse"};

// And those of mechanisms with decays: -1e4 here and there, all of them 1 - 1e-6, and all of
// them nearer to 1 than f32 has numbers.
inline const std::vector<std::string> kGatedVariants = {"state",  "lengths=62", "reverse",
                                                        "strong", "vanishing",  "faint"};

// Sizes, layouts and sequences of random problems; remembers the memory of what it makes.
class RandomParts {
 public:
  RandomParts(DType dtype, uint64_t seed)
      : dtype_(dtype), random_(seed), seed_(seed * 64) {}

  int64_t Integer(int64_t low, int64_t high) { return random_.Integer(low, high); }
  int64_t Tokens();    // 0 to 131, around the borders of blocks
  int64_t Channels();  // 1 to 65, around those of vectors

  // Any order of axes but that of sequences, gaps between them, at either guard; the last axis is
  // contiguous with `rows`, or of four axes or more.
  Buffer Make(DType dtype, const std::vector<int64_t>& sizes, bool rows = false);
  TensorView Normal(const std::vector<int64_t>& sizes);       // N(0, 1)
  TensorView NormalState(const std::vector<int64_t>& sizes);  // row-major, wide
  ConstTensorView Ints(const std::vector<int64_t>& values);
  TensorView Keep(const Buffer& buffer) {
    memory_.push_back(buffer);
    return buffer.view();
  }
  // Lengths and starts, or with `packed` cu_seqlens, and the direction; returns the
  // number of sequences.
  int64_t Sequences(int64_t B, int64_t T, bool packed, Options& options);

  Random& random() { return random_; }
  uint64_t NextSeed() { return ++seed_; }
  const std::vector<Buffer>& memory() const { return memory_; }

 private:
  DType dtype_;
  Random random_;
  uint64_t seed_;
  std::vector<Buffer> memory_;
};

// A view of one token without its axis of tokens, [B, 1, H, ...] as [B, H, ...].
template <class View>
View WithoutTokens(const View& t) {
  if (!t.present() || t.rank() < 3) return t;
  std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end());
  std::vector<int64_t> strides(t.strides().begin(), t.strides().end());
  sizes.erase(sizes.begin() + 1);
  strides.erase(strides.begin() + 1);
  return View(t.data(), t.dtype(), sizes, strides);
}

// [B, T, HV, V], or of channels [B, T, C]; and S, z and m of so many sequences.
std::vector<int64_t> OutputShape(const Definition& d, const AxisSizes& sizes);
struct StateShapes {
  std::vector<int64_t> S, z, m;
  StateShapes(const Definition& d, const AxisSizes& sizes, int64_t features, int64_t sequences);
};

// Fills a tensor that is no decay; `keys` are those of the call, or absent.
const Buffer& FillValues(const Tensor& tensor, const Buffer& buffer, uint64_t seed,
                         const ConstTensorView& keys);

// Element by element; zeros from a view that is absent.
void CopyElements(const ConstTensorView& from, const TensorView& to);

// N(0, 1) rows of any size, decays of ordinary strength.
Case MakeCase(const Mechanism& mechanism, const CaseRequest& request);

// Random sizes, layouts, options and strengths of decays; forward and backward.
Case RandomCase(const Mechanism& mechanism, DType dtype, uint64_t seed);

// OpEntry's `inputs` and `call`.
std::vector<InputSpec> InputsOf(const Definition& definition);
TensorCall CallOn(const Mechanism& mechanism, const Context& ctx, const TensorMap& tensors,
                  std::optional<double> scale);

// The entry of a gated mechanism without options of its own; `bytes` as in OpEntry.
template <const Mechanism& (*kMechanism)()>
OpEntry GatedEntry(const char* bytes) {
  return {.name = kMechanism().name,
          .family = "gated",
          .passes = {"forward", "backward", "step"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = kGatedVariants,
          .flops = "4 D Dv per token and value head, backward 12 D Dv",
          .bytes = bytes,
          .state = "B Hq D Dv 4",
          .make_case = [](const CaseRequest& request) {
            return MakeCase(kMechanism(), request);
          },
          .random_case = [](DType dtype, uint64_t seed) {
            return RandomCase(kMechanism(), dtype, seed);
          },
          .recurrent = &kMechanism(),
          .inputs = InputsOf(kMechanism().definition),
          .call = [](const Context& ctx, const TensorMap& tensors,
                     std::optional<double> scale) {
            return CallOn(kMechanism(), ctx, tensors, scale);
          }};
}

// The entry of a delta rule.
template <const Mechanism& (*kMechanism)()>
OpEntry DeltaEntry() {
  OpEntry entry = GatedEntry<kMechanism>("B Tq (3 Hkv D + Hq D + 2 Hq Dv) size");
  entry.family = "delta";
  if (kMechanism().definition.decay == DecayShape::kNone) entry.variants = kVariants;
  entry.flops = kMechanism().definition.delta == recurrence::Delta::kAfterDecay
                    ? "6 D Dv per token and value head, backward 18 D Dv"
                    : "8 D Dv per token and value head, backward 22 D Dv";
  return entry;
}

}  // namespace heed::recurrent

#endif  // HEED_OPS_MECHANISM_RECURRENT_CASE_H_
