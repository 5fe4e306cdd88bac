// The valid tokens of a call.
#ifndef HEED_MECHANISM_TOKENS_INTERNAL_H_
#define HEED_MECHANISM_TOKENS_INTERNAL_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "heed/core/tensor.h"

namespace heed::mechanism {

// The tokens of one sequence.
struct TokenRange {
  int64_t batch, begin, end;
};

// The sequences of a call for segments of another one: it leaves other tokens as they are; without o, only states.
struct CutSequences {
  std::vector<TokenRange> ranges;
  // Written by the call: the shapes of its states, empty ones for states that it does not have, and their dtype.
  mutable std::vector<std::vector<int64_t>> state_shapes = {};
  mutable DType state_dtype = DType::kF32;
};

// The options of a call that define its sequences.
struct Sequences {
  template <class Options>
  Sequences(const Options& options)  // NOLINT: those of its options
      : lengths(options.lengths), starts(options.starts), cu_seqlens(options.cu_seqlens) {
    if constexpr (requires { options.cut; }) cut = options.cut;
  }

  const ConstTensorView &lengths, &starts, &cu_seqlens;
  const CutSequences* cut = nullptr;  // replaces the others
};

// Writes the sequences of a call to `ranges`, as tokens of its tensors, one of which is `t`: B is its first axis, T the
// `token_axis`. Without data, lengths and starts count as covering all tokens, and cu_seqlens as sequences of one
// length.
void Ranges(const char* op, const char* name, const ConstTensorView& t, int token_axis, const Sequences& sequences,
            bool data, std::vector<TokenRange>& ranges);

inline std::vector<TokenRange> RangesOf(const char* op, const char* name, const ConstTensorView& t,
                                        const Sequences& sequences, int token_axis = 1, bool data = true) {
  std::vector<TokenRange> ranges;
  Ranges(op, name, t, token_axis, sequences, data, ranges);
  return ranges;
}

// [B, H, D] as [B, 1, H, D], and so on.
ConstTensorView OneToken(const char* op, const char* name, const ConstTensorView& t);

// Calls f(b, begin, end) for the tokens of B times T that belong to no sequence; ranges are ascending.
template <class F>
void ForOthers(const std::vector<TokenRange>& ranges, int64_t B, int64_t T, const F& f) {
  for (int64_t b = 0; b < B; ++b) {
    int64_t after = 0;  // end of the ranges so far
    for (const TokenRange& range : ranges) {
      if (range.batch != b) continue;
      if (after < range.begin) f(b, after, range.begin);
      after = std::max(after, range.end);
    }
    if (after < T) f(b, after, T);
  }
}

// Clears those tokens.
void ClearOthers(const std::vector<TokenRange>& ranges, const TensorView& t, int token_axis = 1);

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_TOKENS_INTERNAL_H_
