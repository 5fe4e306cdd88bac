// Any bytes as a call of attention. An invalid call is refused and writes nothing; any other call agrees with
// attention::Reference within the harness's tolerance, on every SIMD target, and writes nothing but its outputs.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/case.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/attention_options_internal.h"
#include "tests/fuzz/attention_call.h"
#include "tests/fuzz/input.h"

namespace heed::attention {
OpEntry Entry();
}

namespace heed::fuzz {
namespace {

// One Context per SIMD target, with its scratch, for the whole run.
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
  return std::find(entry.dtypes.begin(), entry.dtypes.end(), dtype) != entry.dtypes.end();
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
    const bool same = outcome == Outcome::kRan && written ? used[i].UnchangedExcept(written) : used[i].Unchanged();
    if (!same) {
      Fail("wrote outside of the outputs, or although it threw; slot " + std::to_string(i) + "; " +
           attention::Title(call.problem));
    }
  }
}

// Checks that some bytes give every option, also one that is added later.
bool CheckThatAllAreTried(Slots& slots) {
  std::vector<const attention::OptionRow*> missing;
  for (const attention::OptionRow& row : attention::kOptionRows) {
    const bool alone = !std::holds_alternative<uint64_t attention::Options::*>(row.field) &&
                       !std::holds_alternative<uint32_t attention::Options::*>(row.field);
    if (alone) missing.push_back(&row);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 10000 && !missing.empty(); ++i) {
    std::array<uint8_t, 200> bytes;
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    try {
      Input input(bytes.data(), bytes.size());
      const attention::Options& options = MakeCall(input, slots).problem.options;
      std::erase_if(missing, [&](const auto* row) { return attention::IsGiven(*row, options); });
    } catch (const std::bad_alloc&) {  // larger than a slot
    }
  }
  if (!missing.empty()) Fail(std::string("no bytes give the option ") + missing[0]->name);
  return true;
}

void Run(Input input) {
  static Slots& slots = *new Slots;
  static const bool all_are_tried = CheckThatAllAreTried(slots);
  static_cast<void>(all_are_tried);
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
  const Outcome outcome = Try([&] { attention::Forward(ctx, p.in, p.options, {call.o, call.lse}); }, &message);
  CheckWhatIsWritten(call, slots, outcome);
  const auto complain = [&](const std::string& what) { Fail(what + "; " + attention::Title(p) + "; " + message); };
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

  // The plan of the call is available with and without the inputs' data.
  if (attention::Explain(ctx, p.in, p.options).workspace_bytes != attention::Workspace(ctx, p.in, p.options)) {
    complain("Explain and Workspace differ");
  }
  if (call.extreme) return;
  std::vector<ConstTensorView> results = {call.o};
  if (call.lse) results.push_back(call.lse);
  const Comparison comparison = CompareResults(attention::MakeCase(p), results);
  if (!comparison.ok) complain(comparison.message);
}

}  // namespace
}  // namespace heed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  heed::fuzz::Run({data, size});
  return 0;
}
