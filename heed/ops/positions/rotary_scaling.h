// Scalings of rotary position encoding: how a context is extended beyond the
// length that a model was trained on.
//
// Unscaled, pair i of d rotated elements has the frequency w_i = base^(-2i/d).
// With s = factor, L0 = original_max_position_embeddings and L the length of the
// sequence, the scaled frequency is
//
//   linear    w_i / s
//   ntk       w_i of the base  base s^(d/(d-2))
//   dynamic   w_i of the base  base (s max(L, L0)/L0 - (s - 1))^(d/(d-2))
//   yarn      r_i w_i / s + (1 - r_i) w_i,
//             r_i = clip((i - low) / (high - low), 0, 1) (high + 0.001 if they
//             are equal), low = max(floor(c(beta_fast)), 0),
//             high = min(ceil(c(beta_slow)), d - 1),
//             c(n) = d ln(L0 / (2 pi n)) / (2 ln base); truncate = false omits floor and ceil
//   llama3    w_i            if l_i < L0 / high_freq_factor, l_i = 2 pi / w_i
//             w_i / s        if l_i > L0 / low_freq_factor
//             (1 - t) w_i / s + t w_i  between,
//             t = (L0/l_i - low_freq_factor) / (high_freq_factor - low_freq_factor)
//   longrope  w_i / long_factor[i] if L > L0, else w_i / short_factor[i]
//
// Two types multiply cos and sin by an attention factor, which multiplies the logits by its square:
//
//   yarn      attention_factor, else m(mscale) / m(mscale_all_dim) where both are
//             given and not 0, else m(1), with m(a) = 0.1 a ln s + 1 (1 if s <= 1)
//   longrope  attention_factor, else sqrt(1 + ln s / ln L0) (1 if s <= 1)
//
// DeepSeek-V3 sets mscale = mscale_all_dim, for which this is 1, and multiplies
// the scale of its softmax by m(mscale_all_dim)^2 instead: the caller must do this, and never apply both.
//
// Source: Chen et al., arXiv:2306.15595 (linear); Peng, Quesnelle, Fan, Shippole,
// "YaRN", arXiv:2309.00071 (ntk, dynamic, yarn); Grattafiori et al., "The Llama 3
// herd of models", arXiv:2407.21783; Ding et al., "LongRoPE", arXiv:2402.13753;
// names and defaults of Hugging Face Transformers.
#ifndef HEED_OPS_POSITIONS_ROTARY_SCALING_H_
#define HEED_OPS_POSITIONS_ROTARY_SCALING_H_

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "heed/core/export.h"

namespace heed {

enum class RopeType { kDefault, kLinear, kNtk, kDynamic, kYarn, kLlama3, kLongrope };

// The keys of `rope_scaling` or `rope_parameters` in a Transformers config, and max_position_embeddings, which is a
// separate field there. Every type except default needs factor; yarn and longrope default to max_position_embeddings /
// L0. For types with an L0, it defaults to max_position_embeddings. A field that the type does not use must be absent,
// except the two lengths.
struct RotaryScaling {
  RopeType rope_type = RopeType::kDefault;
  std::optional<double> factor = {};                            // s > 0
  std::optional<double> original_max_position_embeddings = {};  // L0
  std::optional<double> max_position_embeddings = {};
  std::optional<double> attention_factor = {};  // yarn, longrope
  std::optional<double> beta_fast = {};         // yarn; default 32
  std::optional<double> beta_slow = {};         // yarn; default 1
  std::optional<double> mscale = {};            // yarn
  std::optional<double> mscale_all_dim = {};    // yarn
  std::optional<bool> truncate = {};            // yarn; default true
  std::optional<double> low_freq_factor = {};   // llama3
  std::optional<double> high_freq_factor = {};  // llama3
  std::vector<double> short_factor = {};        // longrope: d/2 numbers
  std::vector<double> long_factor = {};         // longrope: d/2 numbers

  bool operator==(const RotaryScaling&) const = default;
};

struct RotaryFrequencies {
  std::vector<double> frequencies = {};  // of the d/2 pairs, in radians per position
  double attention_factor = 1;           // of cos and sin
};

// The frequencies of `dim` rotated elements, even and at least 2, in a sequence of `length` positions, which dynamic
// and longrope use. Throws InvalidArgument for a field that is missing, out of range or not used by the type.
HEED_API RotaryFrequencies ScaledRotaryFrequencies(int64_t dim, double base, const RotaryScaling& scaling,
                                                   int64_t length);

// True if frequencies change with the length of a sequence: for dynamic and longrope. Keys that were rotated while it
// was shorter are inconsistent with later ones.
HEED_API bool DependsOnLength(RopeType type);

// "default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope". Throws
// InvalidArgument for anything else.
HEED_API RopeType RopeTypeFromName(std::string_view name);

}  // namespace heed

#endif  // HEED_OPS_POSITIONS_ROTARY_SCALING_H_
