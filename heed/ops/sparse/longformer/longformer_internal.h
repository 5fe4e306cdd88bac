// Shared by the files of longformer: a call that has been checked, and the rows of its tokens.
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

// Where the first token of each sequence stands, where tokens have projections of their own: no other row draws the
// same numbers.
inline constexpr int64_t kFirstPosition = int64_t{1} << 31;

// Ascending, by batch entry, or once for all.
using Tokens = std::vector<std::vector<int64_t>>;

// What attention is called with, for all rows under a pattern; with qg that leaves out the rows of tokens.
struct Call {
  attention::Options options;
  Tokens tokens;
  bool own = false;  // tokens have projections of their own
};

// f(field here, field there) for every option that attention has too.
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

// What attention is called with besides tensors and a pattern.
attention::Options AttentionOptions(const Options& options);

// Checks what attention does not: window and tokens, as many keys as queries, and that qg, kg and vg, of which there
// are all or none, are like q, k and v. Without `data`, pointers may be null. Throws InvalidArgument.
Call CheckedCall(const char* op, const Inputs& in, const Options& options, bool data);

// The rows of tokens, one sequence after the other, and where they stand in the call.
class TokenRows {
 public:
  TokenRows(const softmax::Problem& all, const Tokens& tokens);

  int64_t count() const { return static_cast<int64_t>(rows_.size()); }

  // What these rows compute of other keys and values, without q, o and lse.
  softmax::Problem ProblemOf(const softmax::Problem& all, const softmax::Rows& keys, const softmax::Rows& values) const;

  // Copies them, so many bytes per head, from tensors over all rows, and back.
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
  std::vector<int64_t> begins_;  // of sequences, and the end
};

// Room for rows of tokens, [row, head, channel].
class TokenMemory {
 public:
  TokenMemory(const softmax::Problem& all, int64_t rows, bool backward);

  int64_t bytes() const { return bytes_; }
  void Allocate();

  softmax::Rows q, o, lse;
  softmax::Rows d_o, d_lse, dq;  // of the backward pass

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
