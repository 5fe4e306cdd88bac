// TimedCase: a case with its outputs and a Context, checked before it is timed.
#ifndef HEED_HARNESS_TIMED_CASE_H_
#define HEED_HARNESS_TIMED_CASE_H_

#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/timing.h"

namespace heed {

class TimedCase {
 public:
  // First compares the same problem with its reference, cut to `checked_tokens` queries and keys because the reference
  // is scalar. Throws std::runtime_error if they disagree. Then builds the problem and runs it once. An empty `isa`
  // means no cap.
  TimedCase(const OpEntry& op, const CaseRequest& request, int threads, const std::string& isa = "",
            int64_t checked_tokens = 160);

  void Run();     // Case::timed, or run if that is null
  Sample Time();  // TimeClean

  const Case& problem() const { return case_; }
  const CaseRequest& request() const { return request_; }
  const Context& context() const { return ctx_; }

  // Flops per second of all cores in use, as probed on this thread right now.
  double PeakFlopsPerSecond() const;

  // "B1_T2048_H4_D64 causal".
  std::string Shape() const;

 private:
  CaseRequest request_;
  Context ctx_;
  Case case_;
  std::vector<Buffer> outputs_;
  std::vector<TensorView> views_;
};

}  // namespace heed

#endif  // HEED_HARNESS_TIMED_CASE_H_
