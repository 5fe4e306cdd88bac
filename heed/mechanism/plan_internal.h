// Plans of calls of operations that no engine serves: the memory that a pass reserves, and checks of tensors whose data
// may be missing.
#ifndef HEED_MECHANISM_PLAN_INTERNAL_H_
#define HEED_MECHANISM_PLAN_INTERNAL_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"

namespace heed::mechanism {

// The memory that a pass reserves in its Context. One function computes it for the pass, for Workspace and for Explain.
struct Reservation {
  int64_t per_thread = 0;                       // Scratch
  int64_t shared = 0, staging = 0, tables = 0;  // of all threads

  void Make(Context& ctx) const {
    ctx.ReserveScratch(per_thread);
    ctx.ReserveShared(shared);
    ctx.ReserveStaging(staging);
    ctx.ReserveTables(tables);
  }
  int64_t bytes(const Context& ctx) const { return ctx.num_threads() * per_thread + shared + staging + tables; }
};

// The memory of two passes one after the other.
inline Reservation Larger(const Reservation& a, const Reservation& b) {
  return {std::max(a.per_thread, b.per_thread), std::max(a.shared, b.shared), std::max(a.staging, b.staging),
          std::max(a.tables, b.tables)};
}

// Throws unless the dtype is a float. Without `data`, the pointer may be null.
inline void CheckFloat(const char* op, const char* name, const ConstTensorView& t, bool data) {
  if (data || !t.present() || t.data() != nullptr) return CheckFloat(op, name, t);
  if (!IsFloat(t.dtype())) Fail(op, name, std::string("has dtype ") + Name(t.dtype()), "f64, f32, bf16 or f16");
}

// The number of tokens of all sequences, and of the longest one.
inline int64_t NumTokens(const std::vector<TokenRange>& sequences) {
  int64_t count = 0;
  for (const TokenRange& s : sequences) count += s.end - s.begin;
  return count;
}
inline int64_t LongestOf(const std::vector<TokenRange>& sequences) {
  int64_t longest = 0;
  for (const TokenRange& s : sequences) longest = std::max(longest, s.end - s.begin);
  return longest;
}

// Pairs of a token and one up to it, over all sequences.
inline double CausalPairs(const std::vector<TokenRange>& sequences) {
  double pairs = 0;
  for (const TokenRange& s : sequences) {
    const auto n = static_cast<double>(s.end - s.begin);
    pairs += n * (n + 1) / 2;
  }
  return pairs;
}

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_PLAN_INTERNAL_H_
