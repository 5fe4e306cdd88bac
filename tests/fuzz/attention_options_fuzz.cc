// Any bytes as a call of attention. What must be refused is refused with nothing
// written; everything else agrees with attention::Reference within the harness's
// tolerance, on every SIMD target, and writes nothing but its outputs.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/case.h"
#include "heed/ops/exact/attention/attention.h"
#include "tests/fuzz/attention_call.h"
#include "tests/fuzz/input.h"

namespace heed::attention {
OpEntry Entry();
}

namespace heed::fuzz {
namespace {

// One per SIMD target, with its scratch, for the whole run.
Context& ContextOf(int64_t choice) {
  static const auto& contexts = *[] {
    auto* const all = new std::vector<std::unique_ptr<Context>>;
    for (const std::string& target : AvailableTargets()) {
      all->push_back(std::make_unique<Context>(1));
      all->back()->set_isa(target);
    }
    return all;
  }();
  return *contexts[static_cast<size_t>(choice) % contexts.size()];
}

bool HasKernels(DType dtype) {
  static const auto& entry = *new OpEntry(attention::Entry());
  return std::find(entry.dtypes.begin(), entry.dtypes.end(), dtype) !=
         entry.dtypes.end();
}

enum class Outcome { kRan, kRefused, kUnsupported };

template <class F>
Outcome Try(F&& f, std::string* message) {
  try {
    f();
    return Outcome::kRan;
  } catch (const InvalidArgument& e) {
    *message = e.what();
    return Outcome::kRefused;
  } catch (const Unsupported& e) {
    *message = e.what();
    return Outcome::kUnsupported;
  }
}

void CheckWhatIsWritten(const Call& call, Slots& slots, Outcome outcome) {
  const std::span<Slot> used = slots.used();
  for (size_t i = 0; i < used.size(); ++i) {
    const ConstTensorView written = i == 0   ? ConstTensorView(call.o)
                                    : i == 1 ? ConstTensorView(call.lse)
                                             : ConstTensorView();
    const bool same = outcome == Outcome::kRan && written
                          ? used[i].UnchangedExcept(written)
                          : used[i].Unchanged();
    if (!same) {
      Fail("wrote outside of the outputs, or although it threw; slot " +
           std::to_string(i) + "; " + attention::Title(call.problem));
    }
  }
}

void Run(Input input) {
  static Slots& slots = *new Slots;
  Context& ctx = ContextOf(input.Below(16));
  Call call;
  try {
    call = MakeCall(input, slots);
  } catch (const std::bad_alloc&) {
    return;  // larger than a slot
  }
  const attention::Problem& p = call.problem;
  for (Slot& slot : slots.used()) slot.Remember();

  std::string message;
  const Outcome outcome = Try(
      [&] {
        attention::Forward(ctx, p.in, p.options, {call.o, call.lse});
      },
      &message);
  CheckWhatIsWritten(call, slots, outcome);
  const auto complain = [&](const std::string& what) {
    Fail(what + "; " + attention::Title(p) + "; " + message);
  };
  if (outcome == Outcome::kRefused && call.mistake.empty() && !call.doubtful) {
    complain("refused without a mistake");
  }
  if (outcome == Outcome::kRan && !call.mistake.empty() && !call.doubtful) {
    complain("ran in spite of a mistake");
  }
  if (outcome == Outcome::kUnsupported && HasKernels(p.in.q.dtype())) {
    complain("unsupported although there are kernels");
  }
  if (outcome != Outcome::kRan) return;

  // What would run can be told, with and without the inputs' data.
  if (attention::Explain(ctx, p.in, p.options).workspace_bytes !=
      attention::Workspace(ctx, p.in, p.options)) {
    complain("Explain and Workspace differ");
  }
  if (call.extreme) return;
  std::vector<ConstTensorView> results = {call.o};
  if (call.lse) results.push_back(call.lse);
  const Comparison comparison =
      CompareResults(attention::MakeCase(p), results);
  if (!comparison.ok) complain(comparison.message);
}

}  // namespace
}  // namespace heed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  heed::fuzz::Run({data, size});
  return 0;
}
