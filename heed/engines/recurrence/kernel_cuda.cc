// The entry of the GPU kernel in the list of kernels: the problems that it accepts, and its launches.
#include <cstdint>
#include <string>
#include <utility>

#include "heed/engines/recurrence/cuda/backward.h"
#include "heed/engines/recurrence/cuda/launches.h"
#include "heed/engines/recurrence/cuda/problem_on_device.h"
#include "heed/engines/recurrence/cuda/sweeps.h"
#include "heed/engines/recurrence/kernels.h"

namespace heed::recurrence {
namespace {

Reason DeclinesForm(const Problem& p) {
  const std::pair<bool, const char*> forms[] = {
      {!IsElementwise(p.feature) || !IsElementwise(p.key_feature), "computes only elementwise feature maps"},
      {p.key_mask.data != nullptr, "computes no key masks"},
      {p.has_value_decay, "computes no decays of value channels"},  // the product of both decays may overflow
      {p.channels, "computes no weighted means per channel"},
      {p.erase.data != nullptr && p.read_key.data != nullptr, "computes erase factors only without read keys"},
      {p.writes != 1 && (p.erase.data != nullptr || p.write.data != nullptr),
       "computes factors per channel only with one write per token"},
      {p.writes != 1 && (p.read_key.data != nullptr || p.gate == Gate::kKey),
       "computes several writes per token only without read keys and gates per channel"},
      {(p.skip.data != nullptr || p.output_gate.data != nullptr) && (p.key_size > cuda::kMostKeys || p.normalize),
       "computes skips and gates around states of up to 128 key channels, not normalised"},
      {p.delta != Delta::kNone && p.key_size > cuda::kMostKeys, "computes delta rules of up to 128 key channels"},
      {p.value_heads > cuda::kMostHeads, "takes up to 65535 heads"},
      {p.gate == Gate::kScalar && p.constant_decay && p.value_heads > cuda::kMostDecays,
       "takes up to 1024 constant decays"}};
  for (const auto& [given, words] : forms) {
    if (given) return {words};
  }
  return {};
}

Reason Declines(const Context&, const Problem& p) {
  if (const Reason reason = engine::DeclinesAllButF32(p.dtype); !reason.empty()) return reason;
  if (const Reason reason = DeclinesForm(p); !reason.empty()) return reason;
  thread_local std::string reason;  // owns the text until the next call
  reason = cuda::Declines(p.device, cuda::ForwardSweep(cuda::FormOnDevice(p), p.initial, p.initial_z));
  return {reason.c_str()};
}

void Compute(const Context& ctx, const Problem& given, const States& initial, const States& initial_z) {
  if (given.value_heads == 0) return;
  const cuda::ProblemOnDevice on_device(ctx, given);
  const Problem& p = on_device.problem();
  const cuda::Launcher launcher(ctx, p);
  cuda::Sweep w = cuda::ForwardSweep(p, initial, initial_z);
  if (p.normalize) {
    const int64_t row = w.params.value_size;
    const cuda::Floats sums(launcher.call(), true, launcher.tokens() * p.value_heads * row);
    w.o = launcher.InMemory(sums, row);
    w.into_memory = true;
    launcher.Run(w);
    launcher.Gather({.from = sums.data(), .divides = true, .floors = on_device.floors()}, p.o, p.value_heads,
                    p.value_size);
  } else {
    launcher.RunWithBonus(w);
  }
  launcher.Clear(p.o, p.value_heads, p.value_size);
}

}  // namespace

const Kernel kCuda = {
    .name = cuda::kName,
    .why =
        "64 columns of a state in the registers of a block, 16 tokens at a time, products of bf16 splits summed in f32",
    .declines = &Declines,
    .forward_passes =
        [](const Context&) {
          return Passes{.forward = [](Context& ctx, const Problem& p) { Compute(ctx, p, p.initial, p.initial_z); },
                        .workspace = [](const Context&, const Problem&) { return int64_t{0}; },
                        .step = [](Context& ctx, const Problem& p) { Compute(ctx, p, p.final, p.final_z); }};
        },
    .backward_passes =
        [](const Context&) {
          return Passes{
              .backward = &cuda::Backward,
              .backward_workspace = [](const Context&, const Problem&, const Gradients&) { return BackwardBytes(); }};
        },
    .target = [](const Context&) { return std::string("cuda"); },
    .device = DeviceType::kCuda,
};

}  // namespace heed::recurrence
