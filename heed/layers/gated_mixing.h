// GatedMixing: any mechanism, by its name, between projections of all its arguments, a norm of each head and a gate. It
// is the mixing layer of the byte-level model of examples/byte_lm, and similar to RetNet if the mechanism is retention.
//
//   a_i = f_i(W_i x + b_i) for each argument of the mechanism, f_i(b_i) if it is a constant
//   y = out(rms(mechanism(a_1, a_2, ...)) .* silu(gate(x)))
//
//   mechanism                                  q, k and v               further arguments
//   "none"                                     v alone, the result      none
//   "attention"                                q and k rotated          none: causal, over `window` tokens
//   "linear_attention", "based", "retention"   q and k rotated          none
//   "lightning"                                unchanged                log_decay, a constant per head
//   "simple_gla"                               unchanged                log_decay per head
//   "gla"                                      unchanged                log_decay per key channel
//   "hgrn2"                                    q, and i as v            log_decay per key channel
//   "mlstm"                                    unchanged                i and f per head
//   "rwkv6"                                    r as q, k, v             log_decay, and u, constant, per key channel
//   "gated_delta_rule"                         k of norm 1              beta and log_decay per head
//   "kda"                                      k of norm 1              beta per head, log_decay per key channel
//   "rwkv7"                                    r as q, k of norm 1, v   log_decay and share per key channel;
//                                                                       a = -k, b = k .* share
//
// log_decay is log(sigmoid(.)), beta and share are sigmoid(.). Rotation is by rotary positions, half split, of base
// 10000.
#ifndef HEED_LAYERS_GATED_MIXING_H_
#define HEED_LAYERS_GATED_MIXING_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"

namespace heed::layers {

struct MixingMechanism;  // a row of the table above

class HEED_API GatedMixing : public Layer {
 public:
  struct Config {
    std::string mechanism = "retention";
    int64_t width = 0, heads = 0;
    int64_t key_dim = 0, value_dim = 0;  // channels of a head; 0: width / heads
    int64_t window = 0;                  // attention: tokens that a token sees, itself included; 0: all before it
    double norm_eps = 1e-6;
  };

  // Takes for each argument inputs.NAME.weight [heads n, width], and inputs.NAME.bias [heads n] for constants,
  // log_decay, beta, share and f, where n is key_dim, value_dim or 1; gate.weight [heads value_dim, width], out.weight
  // [width, heads value_dim].
  GatedMixing(const Config& config, const Weights& weights);

  // The state: "S", "z" and "m" as the mechanism defines them, or a cache of keys and values for attention.
  State MakeState(const StateOptions& options = {}) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  Config config_;
  const MixingMechanism* mechanism_;
  Linear in_, out_;  // in_: projected arguments, in the table's order, and the gate
  std::map<std::string_view, std::vector<float>> constants_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_GATED_MIXING_H_
