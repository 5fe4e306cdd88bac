// What a mechanism on the recurrence engine says of itself, and its passes from that.
#ifndef HEED_OPS_MECHANISM_RECURRENT_INTERNAL_H_
#define HEED_OPS_MECHANISM_RECURRENT_INTERNAL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "heed/core/context.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/ops/mechanism/recurrent.h"

namespace heed::recurrent {

// A mechanism's own options with those of a call that every mechanism has.
template <class Own>
Own With(Own own, const Options& common) {
  static_cast<Options&>(own) = common;
  return own;
}

enum class DecayShape {
  kNone,
  kHead,     // [HV]
  kHeadKey,  // [HV, K]
  kToken,    // [B, T, HV]
  kKey,      // [B, T, HV, K]
};

// Of constants, without axes of sequences and tokens.
inline bool IsConstant(DecayShape shape) {
  return shape == DecayShape::kHead || shape == DecayShape::kHeadKey;
}

// Of a mean per channel, of each token: sums, products and two exponentials of 20.
inline constexpr double kFlopsOfChannels = 60;

// What a mechanism computes around its recurrence.
struct Surroundings {
  // Of the engine's Problem, in the compute type: [B, T, HV], [HV, V], and in q's dtype
  // [B, T, HV, V].
  ConstTensorView value_factors, skip, output_gate;
  ConstTensorView key_mask;  // [B, T] bool
  // Writes what is still to be written in these and in log_decay: runs after all checks,
  // before anything else.
  std::function<void()> prepare;
  bool wide_o = false, wide_dv = false;  // o and d_o, or dv, are in the compute type
};

struct Definition {
  DecayShape decay = DecayShape::kNone;
  bool root_scale = false;  // the default scale is K^-1/2, else 1
  recurrence::Feature feature = recurrence::Feature::kIdentity;
  std::optional<recurrence::Feature> key_feature = {};  // the same unless given
  double feature_eps = 0;  // of random ones
  bool causal = true;  // without it no states
  bool normalize = false;
  double eps = 0;
  bool complement_keys = false;  // k is 1 - exp(log_decay), not given
  bool value_decay = false;      // columns of the state may decay too
  bool bonus = false;            // queries see the state before their token, and u
  recurrence::Delta delta = recurrence::Delta::kNone;  // before the decay: takes a and b
  bool beta = false, read_key = false;                 // of delta rules: beta; p
  bool erase_and_write = false;                        // factors by channel
  bool several_writes = false;  // k, v and beta have an axis of them: [B, T, n, ...]
  bool exp_gates = false;       // i and f, normalised
  bool channels = false;  // a head is a channel: tensors are [B, T, C], states [B, C], there is no key

  // What errors call the tensors.
  const char *query_name = "q", *key_name = "k", *value_name = "v";
  const char *state_names[3] = {"", ".z", ".m"};  // behind "state"
  bool value_first = false;  // states are [B, HV, V, K]
  const Surroundings* surroundings = nullptr;
};

// A tensor that a mechanism takes: what checks, outputs, cases, tests and bindings know of it.
struct Tensor {
  enum Type {
    kSame,      // q's dtype
    kWide,      // that, or the dtype of states
    kAnyFloat,  // constants
  };
  // Of random problems. Keys of delta rules are unit vectors, what reads and what writes nearly
  // the same, so that states stay what they are. Open gates are 3 and more before a sigmoid.
  enum Values { kNormal, kDecays, kFractions, kUnit, kNearlyKeys, kNegativeKeys, kOpenGates };

  const char* name = nullptr;
  // A letter each: B, T, N writes, H key heads, G value heads, K, V, M, and C channels.
  const char* axes = "";
  ConstTensorView Inputs::*input = nullptr;
  ConstTensorView StepInputs::*step = nullptr;
  TensorView Gradients::*gradient = nullptr;
  Type type = kSame;
  Values values = kNormal;
  bool optional = false;

  bool over_tokens() const { return axes[0] == 'B'; }
  // Rows are read in place, not copied one by one.
  bool contiguous_rows() const {
    const char last = axes[std::string_view(axes).size() - 1];
    return (last == 'K' || last == 'V' || (last == 'C' && over_tokens())) && (over_tokens() || values != kDecays);
  }
};

// Those of a mechanism, q first, without memory of its own.
class Tensors {
 public:
  explicit Tensors(const Definition& definition);
  static Tensors NotOf(const Definition& definition);  // what other mechanisms take
  static const Tensor* Any(std::string_view name);     // of any mechanism; or null
  const Tensor* begin() const { return tensors_.data(); }
  const Tensor* end() const { return tensors_.data() + count_; }
  const Tensor* Find(std::string_view name) const;  // null: there is none

 private:
  Tensors() = default;

  std::array<Tensor, 20> tensors_;
  size_t count_ = 0;
};

// What the letters of axes stand for in a call.
struct AxisSizes {
  int64_t B = 0, T = 0, H = 0, G = 0, K = 0, V = 0, M = 0, N = 1;
  int64_t operator[](char letter) const;
};

// Of values [B, T, ..., HV, V], or of channels.
inline int64_t ValueHeads(const Inputs& in) { return in.v.size(in.v.rank() - (in.v.rank() > 3 ? 2 : 1)); }
inline int64_t ValueSize(const Inputs& in) { return in.v.rank() > 3 ? in.v.size(in.v.rank() - 1) : 1; }
inline int64_t KeySize(const Inputs& in) { return in.q.rank() > 3 ? in.q.size(3) : 1; }

// The state has a running maximum m.
inline bool HasMaximum(const Definition& d) {
  return d.causal && (recurrence::IsRandom(d.feature) || d.exp_gates || d.channels);
}

// Rows of the state: channels of phi(q).
inline int64_t FeaturesOf(const Definition& definition, const Inputs& in) {
  return recurrence::IsRandom(definition.feature)
             ? in.projection.size(0)
             : recurrence::FeatureSize(definition.feature, KeySize(in));
}

// f64, or f32: of states, and what is computed in.
DType StateDType(DType dtype);

// Each checks all arguments before anything is written and throws InvalidArgument with
// `op`, the argument, what it got and what it expected.
void Forward(const char* op, Context& ctx, const Definition& definition,
             const Inputs& in, const Options& options, const Outputs& out);
void Backward(const char* op, Context& ctx, const Definition& definition,
              const BackwardInputs& in, const Options& options, const Gradients& out);

// One token: `state` is updated in place.
void Step(const char* op, Context& ctx, const Definition& definition,
          const StepInputs& in, const Options& options, const State& state,
          const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all its threads.
int64_t Workspace(const char* op, const Context& ctx, const Definition& definition,
                  const Inputs& in, const Options& options);
int64_t BackwardWorkspace(const char* op, const Context& ctx,
                          const Definition& definition, const Inputs& in,
                          const Options& options);
Explanation Explain(const char* op, const Context& ctx, const Definition& definition,
                    const Inputs& in, const Options& options);

// The sequences of a call, in tokens of its tensors. Without data, lengths and starts that
// have none count as given for all tokens, and cu_seqlens as of sequences of one length.
struct TokenRange {
  int64_t batch, begin, end;
};
std::vector<TokenRange> Ranges(const char* op, const ConstTensorView& q,
                               const Options& options, bool data = true);
void Ranges(const char* op, const ConstTensorView& q, const Options& options, bool data,
            std::vector<TokenRange>& ranges);  // in the memory that is there

// Sizes or strides, on the stack: a step allocates nothing.
class Axes {
 public:
  Axes() = default;
  Axes(std::initializer_list<int64_t> sizes) : Axes(std::span(sizes.begin(), sizes.end())) {}
  Axes(std::span<const int64_t> sizes) : rank_(sizes.size()) {  // NOLINT: the same numbers
    std::copy(sizes.begin(), sizes.end(), sizes_.begin());
  }
  int64_t& operator[](size_t axis) { return sizes_[axis]; }
  void Append(int64_t size) { sizes_[rank_++] = size; }
  operator std::span<const int64_t>() const {  // NOLINT: the same numbers
    return {sizes_.data(), rank_};
  }
  operator std::vector<int64_t>() const {  // NOLINT: the same numbers
    return {sizes_.data(), sizes_.data() + rank_};
  }

 private:
  std::array<int64_t, kMaxRank> sizes_{};
  size_t rank_ = 0;
};

// The shape of a tensor with these axes.
Axes ShapeOf(const char* axes, const AxisSizes& sizes);

// Of a tensor that is read: throws InvalidArgument unless it is there and readable, of
// this shape and dtype. With `data` false, pointers may be null.
void CheckInput(const char* op, const char* name, const ConstTensorView& t,
                const Axes& shape, DType dtype, bool data);

// [B, H, D] as [B, 1, H, D], and so on.
ConstTensorView OneToken(const char* op, const char* name, const ConstTensorView& t);

// Zeros in [B, T, H, ...] for tokens that no sequence has.
void ClearOthers(const std::vector<TokenRange>& ranges, const TensorView& t);

}  // namespace heed::recurrent

#endif  // HEED_OPS_MECHANISM_RECURRENT_INTERNAL_H_
