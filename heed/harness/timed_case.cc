// TimedCase: a case is timed only after its results were checked.
#include "heed/harness/timed_case.h"

#include <algorithm>
#include <stdexcept>

#include "heed/core/os.h"
#include "heed/harness/probe.h"

namespace heed {
namespace {

void CheckShorter(const OpEntry& op, CaseRequest request, int64_t tokens, Context& ctx) {
  request.sizes.Tq = std::min(request.sizes.Tq, tokens);
  request.sizes.Tk = std::min(request.sizes.Tk, tokens);
  const Comparison c = Compare(op.make_case(request), ctx);
  if (!c.ok) throw std::runtime_error("not timed, wrong result: " + c.message);
}

}  // namespace

TimedCase::TimedCase(const OpEntry& op, const CaseRequest& request, int threads, const std::string& isa,
                     int64_t checked_tokens)
    : request_(request), ctx_(threads) {
  if (!isa.empty()) ctx_.set_isa(isa);
  CheckShorter(op, request, checked_tokens, ctx_);
  case_ = op.make_case(request);
  for (const OutputSpec& spec : case_.outputs) {
    outputs_.push_back(spec.strides.empty() ? Buffer(spec.dtype, spec.sizes, Placement::kAligned)
                                            : Buffer(spec.dtype, spec.sizes, spec.strides, Placement::kAligned));
    views_.push_back(outputs_.back().view());
  }
  case_.run(ctx_, views_);
}

void TimedCase::Run() { (case_.timed ? case_.timed : case_.run)(ctx_, views_); }

Sample TimedCase::Time() {
  return TimeClean(ctx_.num_threads(), [this] { Run(); });
}

double TimedCase::PeakFlopsPerSecond() const {
  const int cores = std::min(ctx_.num_threads(), os::NumUsableCpus());
  return cores * probe::PeakFlopsPerSecond(request_.dtype, ctx_.allowed_targets());
}

std::string TimedCase::Shape() const {
  const std::string sizes = ToString(request_.sizes);
  return request_.variant.empty() ? sizes : sizes + " " + request_.variant;
}

}  // namespace heed
