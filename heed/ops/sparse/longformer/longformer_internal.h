// Common parts of the files of longformer: a checked call, and the rows of its global tokens.
#ifndef HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_INTERNAL_H_
#define HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "heed/core/os.h"
#include "heed/engines/softmax/problem.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/sparse/longformer/longformer.h"

namespace heed::longformer {

// Position of the first global token of each sequence, where global tokens have separate projections: no other row
// draws the same random numbers.
inline constexpr int64_t kFirstPosition = int64_t{1} << 31;

// Ascending, per batch entry or once for all.
using Tokens = std::vector<std::vector<int64_t>>;

// The arguments of attention for all rows under a pattern; with qg the pattern excludes the rows of global tokens.
struct Call {
  attention::Options options;
  Tokens tokens;
  bool own = false;  // global tokens have separate projections
};

// Calls f(field here, field there) for every option that attention has too.
template <class F>
void ForEachShared(const F& f) {
  using Shared = attention::Options;
  f(&Options::scale, &Shared::scale);
  f(&Options::key_lengths, &Shared::key_lengths);
  f(&Options::key_starts, &Shared::key_starts);
  f(&Options::query_lengths, &Shared::query_lengths);
  f(&Options::softcap, &Shared::softcap);
  f(&Options::dropout, &Shared::dropout);
  f(&Options::seed, &Shared::seed);
  f(&Options::dropout_offset, &Shared::dropout_offset);
  f(&Options::cu_seqlens_q, &Shared::cu_seqlens_q);
  f(&Options::precision, &Shared::precision);
  f(&Options::invariant, &Shared::invariant);
}

// The options of attention, without tensors and the pattern.
attention::Options AttentionOptions(const Options& options);

// Checks what attention does not: window and tokens, equal numbers of keys and queries, and that qg, kg and vg are all
// present or all absent and like q, k and v. Without `data`, pointers may be null. Throws InvalidArgument.
Call CheckedCall(const char* op, const Inputs& in, const Options& options, bool data);

// The rows of global tokens, one sequence after the other, and their places in the call.
class TokenRows {
 public:
  TokenRows(const softmax::Problem& all, const Tokens& tokens);

  int64_t count() const { return static_cast<int64_t>(rows_.size()); }

  // The problem of these rows with their own keys and values, without q, o and lse.
  softmax::Problem ProblemOf(const softmax::Problem& all, const softmax::Rows& keys, const softmax::Rows& values) const;

  // Gathers these rows, `channels` elements per head, from tensors over all rows, and scatters them back.
  void Gather(const softmax::Rows& all, const softmax::Rows& gathered, DType dtype, int64_t channels) const;
  void PutBack(const softmax::Rows& gathered, const softmax::Rows& all, DType dtype, int64_t channels) const;

 private:
  struct Row {
    int64_t batch, token;
  };
  template <class F>
  void ForHeads(const softmax::Rows& all, const softmax::Rows& gathered, DType dtype, const F& f) const;

  int64_t heads_;
  std::vector<Row> rows_;
  std::vector<int64_t> begins_;  // first row of each sequence, and the end
};

// Memory for rows of global tokens, [row, head, channel].
class TokenMemory {
 public:
  TokenMemory(const softmax::Problem& all, int64_t rows, bool backward);

  int64_t bytes() const { return bytes_; }
  void Allocate();

  softmax::Rows q, o, lse;
  softmax::Rows d_o, d_lse, dq;  // for the backward pass

 private:
  void LayOut(void* base);

  DType dtype_;
  int64_t rows_, heads_, depth_, value_depth_;
  bool backward_;
  int64_t bytes_ = 0;
  std::unique_ptr<void, decltype(&os::FreeAligned)> memory_;
};

}  // namespace heed::longformer

#endif  // HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_INTERNAL_H_
