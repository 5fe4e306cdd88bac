// The list of kernels and the choice from it.
#include "heed/engines/recurrence/kernels.h"

namespace heed::recurrence {

Reason DeclinesOtherStates(const Problem& problem) {
  if (problem.delta != Delta::kNone) return {"computes no delta rules"};
  return {problem.channels ? "computes no weighted means per channel" : ""};
}

Reason DeclinesOtherDeltas(const Problem& problem) {
  if (problem.delta == Delta::kNone) return {"computes delta rules"};
  const bool without_keys = problem.delta == Delta::kBeforeDecay && problem.gate != Gate::kKey;
  return {without_keys ? "computes reads before the decay only with decays per key channel" : ""};
}

const Kernel& Choose(const char* op, const Context& ctx, const Problem& problem, engine::Pass pass) {
  static constexpr const Kernel* kKernels[] = {&kCuda,     &kAmx,      &kRecurrenceF32, &kRecurrenceF64,
                                               &kDeltaF32, &kDeltaF64, &kChannels};
  return engine::Choose(kKernels, op, ctx, problem, pass);
}

}  // namespace heed::recurrence
