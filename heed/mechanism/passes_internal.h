// The passes of the mechanisms on an engine, which is that of their Definition (recurrent.cc, scanning.cc).
#ifndef HEED_MECHANISM_PASSES_INTERNAL_H_
#define HEED_MECHANISM_PASSES_INTERNAL_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/mechanism/table_internal.h"

namespace heed::mechanism {

// Each function checks all arguments before anything is written and throws InvalidArgument with `op`, the argument, its
// value and what was expected.
template <class Definition>
struct Passes {
  using Options = typename Definition::Options;

  static void Forward(const char* op, Context& ctx, const Definition& definition, const Arguments& in,
                      const Options& options, const Results& out);
  static void Backward(const char* op, Context& ctx, const Definition& definition, const Arguments& in,
                       const Options& options, const Results& out);
  // One token: the states are updated in place.
  static void Step(const char* op, Context& ctx, const Definition& definition, const Arguments& in,
                   const Options& options, const Results& out);
  // Bytes that the passes reserve in `ctx`, for all threads.
  static int64_t Workspace(const char* op, const Context& ctx, const Definition& definition, const Arguments& in,
                           const Options& options);
  static int64_t BackwardWorkspace(const char* op, const Context& ctx, const Definition& definition,
                                   const Arguments& in, const Options& options);
  static Explanation Explain(const char* op, const Context& ctx, const Definition& definition, const Arguments& in,
                             const Options& options);
};

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_PASSES_INTERNAL_H_
