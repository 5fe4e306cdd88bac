// Options of recurrent mechanisms.
//
// Sizes: B sequences, T tokens, H key heads, HV value heads (a multiple of H; head h reads
// key head h / (HV / H)), K and V key and value channels, all but B, T and H >= 1.
//
// Queries, keys and values have one float dtype and a contiguous last axis, any other strides. Factors and decays may
// also be f32 or f64. States are f64 for f64, else f32, with any strides; an absent initial state is zeros (-infinity
// for the maximum of random features), and an absent final state is not computed. Tokens outside lengths, starts or
// cu_seqlens have o = 0.
#ifndef HEED_MECHANISM_RECURRENT_H_
#define HEED_MECHANISM_RECURRENT_H_

#include <cstdint>
#include <optional>

#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::recurrent {

// Tensors may be on a GPU, all on the same one, if the call has a GPU kernel (docs/cpp.md), except those that the call
// itself reads: decays without axes of sequences and tokens, lengths, starts and cu_seqlens. Values on a GPU are not
// checked.
using mechanism::Explanation;

struct Options {
  std::optional<double> scale;      // factor of q; the default is the mechanism's
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1; states have N instead of B
  bool reverse = false;             // from the last token to the first; the final state is after the first
  // Tokens per segment, a multiple of 64; 0: none. The segments of a sequence, which begin at multiples of it from its
  // first token, are summarised at once, and once the states between them are known they are computed at once, so that
  // a head occupies as many threads as it has segments (docs/reproducibility.md). Step has none.
  int64_t segment = 0;
  mechanism::SequencesOfHeed cut = nullptr;  // heed's own calls have it
};

}  // namespace heed::recurrent

#endif  // HEED_MECHANISM_RECURRENT_H_
