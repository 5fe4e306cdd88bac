// The rows of global tokens: their indices, their problem, and copies of them.
#include <algorithm>
#include <cstring>

#include "heed/core/carver.h"
#include "heed/ops/sparse/longformer/longformer_internal.h"

namespace heed::longformer {

using softmax::Problem;
using softmax::Rows;
using softmax::Sequence;

TokenRows::TokenRows(const Problem& all, const Tokens& tokens) : heads_(all.query_heads) {
  for (const Sequence& s : all.sequences) {
    begins_.push_back(count());
    for (const int64_t token : tokens[tokens.size() == 1 ? 0 : static_cast<size_t>(s.batch)]) {
      if (token < std::min(s.num_queries, s.query_end)) rows_.push_back({s.batch, s.first_q + token});
    }
  }
  begins_.push_back(count());
}

Problem TokenRows::ProblemOf(const Problem& all, const Rows& keys, const Rows& values) const {
  Problem p = all;
  p.has_pattern = false;
  p.kept.clear();
  p.q = p.o = p.lse = {};
  p.k = keys;
  p.v = values;
  for (size_t i = 0; i < p.sequences.size(); ++i) {
    Sequence& s = p.sequences[i];
    s.kept = nullptr;
    s.first_q = begins_[i];
    s.num_queries = s.query_end = begins_[i + 1] - begins_[i];
    s.start = kFirstPosition;
  }
  return p;
}

// Calls f(in the call, gathered) for the bytes of each row and head.
template <class F>
void TokenRows::ForHeads(const Rows& all, const Rows& gathered, DType dtype, const F& f) const {
  const auto at = [&](const Rows& rows, int64_t batch, int64_t token, int64_t head) {
    const int64_t element = batch * rows.batch_stride + token * rows.token_stride + head * rows.head_stride;
    return static_cast<char*>(const_cast<void*>(rows.data)) + element * static_cast<int64_t>(SizeOf(dtype));
  };
  for (int64_t i = 0; i < count(); ++i) {
    const Row& row = rows_[static_cast<size_t>(i)];
    for (int64_t h = 0; h < heads_; ++h) f(at(all, row.batch, row.token, h), at(gathered, 0, i, h));
  }
}

void TokenRows::Gather(const Rows& all, const Rows& gathered, DType dtype, int64_t channels) const {
  const size_t bytes = SizeOf(dtype) * static_cast<size_t>(channels);
  ForHeads(all, gathered, dtype, [&](const char* from, char* to) { std::memcpy(to, from, bytes); });
}

void TokenRows::PutBack(const Rows& gathered, const Rows& all, DType dtype, int64_t channels) const {
  const size_t bytes = SizeOf(dtype) * static_cast<size_t>(channels);
  ForHeads(all, gathered, dtype, [&](char* to, const char* from) { std::memcpy(to, from, bytes); });
}

TokenMemory::TokenMemory(const Problem& all, int64_t rows, bool backward)
    : dtype_(all.dtype), rows_(rows), heads_(all.query_heads), depth_(all.depth), value_depth_(all.value_depth),
      backward_(backward), memory_(nullptr, &os::FreeAligned) {
  LayOut(nullptr);
}

void TokenMemory::Allocate() {
  memory_.reset(os::AllocateAligned(std::max<int64_t>(bytes_, 1)));
  LayOut(memory_.get());
}

void TokenMemory::LayOut(void* base) {
  const auto element = static_cast<int64_t>(SizeOf(dtype_)), of_lse = dtype_ == DType::kF64 ? int64_t{8} : int64_t{4};
  Carver carver(base);
  const auto next = [&](Rows& rows, int64_t channels, int64_t bytes) {
    char* at = nullptr;
    carver.Next(at, rows_ * heads_ * channels * bytes);
    rows = {at, 0, heads_ * channels, channels};
  };
  next(q, depth_, element);
  next(o, value_depth_, element);
  next(lse, 1, of_lse);
  if (backward_) {
    next(d_o, value_depth_, element);
    next(d_lse, 1, of_lse);
    next(dq, depth_, element);
  }
  bytes_ = carver.bytes();
}

}  // namespace heed::longformer
