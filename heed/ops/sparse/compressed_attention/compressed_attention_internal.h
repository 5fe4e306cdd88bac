// Common parts of the files of compressed attention: a checked call as two parts, each one call of attention.
#ifndef HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_INTERNAL_H_
#define HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/sparse/compressed_attention/compressed_attention.h"

namespace heed::compressed_attention {

enum Part { kWindow, kCompressed };

struct Call {
  int64_t B = 0, Tq = 0, Tk = 0, N = 0, Hq = 0, Hkv = 0, D = 0, Dv = 0;
  int64_t start = 0, ratio = 1;
  bool has_window = false;        // otherwise the window part is not computed
  bool packed = false;            // sequences follow each other in one batch entry
  attention::Options options[2];  // of the parts
  // The tokens of each sequence, counted from position 0 of its batch entry, and how many compressed keys sequences
  // have before it; the last element counts those of all.
  std::vector<mechanism::TokenRange> sequences;
  std::vector<int64_t> first_keys;
  // Options point to these: the position of row 0 of each sequence; its tokens, as tokens of k and q; boundaries.
  std::vector<int64_t> positions, key_begins, key_ends, row_ends, boundaries, all_rows, all_keys;

  // A row's position in its sequence, -1 if it belongs to none, and the sequence's first compressed key.
  struct Place {
    int64_t position = -1, first_key = 0;
  };
  Place PlaceOf(int64_t b, int64_t i) const;
  // The number of compressed keys that row i of sequence b may see.
  int64_t NumComplete(int64_t b, int64_t i) const { return (PlaceOf(b, i).position + 1) / ratio; }
  // The number of rows up to the end of the last packed sequence.
  int64_t rows() const { return packed ? boundaries.back() : Tq; }
};

// Checks all inputs, and for Forward and its reference the outputs. The options of the compressed part have the chosen
// keys, listed by the threads of `ctx` if it is not null. Throws InvalidArgument.
Call CheckedCall(const char* op, Context* ctx, const Inputs& in, const Options& options, const Outputs& out,
                 attention::Use use);

// Checks the arguments of Backward. kExplain and kReference read neither o nor lse, and the gradients of kReference may
// be f64.
Call CheckedBackward(const char* op, Context* ctx, const BackwardInputs& in, const Options& options,
                     const Gradients& out, attention::Use use);

// q with the keys and values of a part.
attention::Inputs PartInputs(const Inputs& in, int64_t part);

// An lse [B, Hq, Tq] as attention takes it, without B where sequences are packed.
template <class View>
View LseOf(const Call& c, const View& lse) {
  if (!c.packed || !lse.present()) return lse;
  return {lse.data(), lse.dtype(), lse.sizes().subspan(1), lse.strides().subspan(1), lse.device()};
}

// A row's place by the definition, for the reference and for tolerances: its token and its sequence's, counted from
// position 0, and the sequence's first compressed key.
struct DefinedPlace {
  int64_t token = 0, begin = 0, end = 0, first_key = 0;

  bool is_valid() const { return begin <= token && token < end; }
  int64_t num_complete(int64_t ratio) const { return is_valid() ? (token - begin + 1) / ratio : 0; }
};
DefinedPlace PlaceByDefinition(const Inputs& in, const Options& options, int64_t b, int64_t i);

}  // namespace heed::compressed_attention

#endif  // HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_INTERNAL_H_
