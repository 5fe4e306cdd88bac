// Options of mechanisms on the scan engine.
//
// Sizes: B sequences, T tokens, D channels, N states per channel, G groups of channels, which
// divide D; N and G are at least 1. L taps, at most T. H heads of d channels, D = H d; W taps, at least
// 1, of their keys.
//
// Any strides; fast where tokens or channels are contiguous, otherwise refused by a strict Context. Tensors over tokens
// have the dtype of the first tensor or of states, which is f64 for f64 and else f32; constants have any float dtype.
// States have any strides; an absent initial state is zeros, unless the mechanism says otherwise, and an absent final
// state is not computed. Tokens outside lengths, starts or cu_seqlens do not change the state and have o = 0.
#ifndef HEED_MECHANISM_SCANNING_H_
#define HEED_MECHANISM_SCANNING_H_

#include <cstdint>

#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::scanning {

using mechanism::Explanation;

struct Options {
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1; states have N instead of B, one per sequence
  bool reverse = false;             // from the last token to the first; the final state is after the first
  // Tokens per segment, a multiple of 64; 0: none. The segments of a sequence, which begin at multiples of it from its
  // first token, are summarised at once, and once the states between them are known they are computed at once, so that
  // a head occupies as many threads as it has segments (docs/reproducibility.md). Step has none.
  int64_t segment = 0;
  mechanism::SequencesOfHeed cut = nullptr;  // heed's own calls have it
};

}  // namespace heed::scanning

#endif  // HEED_MECHANISM_SCANNING_H_
