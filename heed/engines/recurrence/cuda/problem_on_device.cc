// Problems in the form that sweeps take.
#include "heed/engines/recurrence/cuda/problem_on_device.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/engines/recurrence/cuda/gradient_blocks.h"

namespace heed::recurrence::cuda {

ProblemOnDevice::ProblemOnDevice(const Context& ctx, const Problem& p) : given_(p) {
  const bool has_decays = p.constant_decay && p.gate == Gate::kKey, splits = p.delta == Delta::kBeforeDecay;
  const bool has_factors = p.erase.data != nullptr || p.write.data != nullptr;
  if (!has_decays && !splits && !p.exp_gates && !has_factors) return;
  call_.emplace(kName, ctx, p.device);
  moved_ = p;
  if (has_decays) MoveDecays();
  if (splits) SplitTokens(ctx);
  if (p.exp_gates) TakeGates(ctx);
  if (has_factors) TakeFactors(ctx);
}

void ProblemOnDevice::MoveDecays() {
  const Problem& p = given_;
  std::vector<float> decays;
  for (int64_t head = 0; head < p.value_heads; ++head) {
    const float* of_head = static_cast<const float*>(p.log_decay.data) + head * p.log_decay.head_stride;
    decays.insert(decays.end(), of_head, of_head + p.key_size);
  }
  moved_->log_decay = {uploads_.emplace(*call_).Put(decays), DType::kF32, 0, 0, p.key_size};
}

Rows ProblemOnDevice::RowsIn(std::optional<heed::cuda::DeviceMemory>& memory, DType dtype, int64_t of_token) {
  int64_t batches = 1, begin = 0, end = 0;  // with negative strides tokens are at or below 0
  for (const Sequence& s : given_.sequences) {
    batches = std::max(batches, s.batch + 1);
    begin = std::min(begin, s.first);
    end = std::max(end, s.first + s.count);
  }
  const int64_t of_batch = (end - begin) * of_token, size = static_cast<int64_t>(SizeOf(dtype));
  memory.emplace(*call_, static_cast<size_t>(std::max<int64_t>(1, batches * of_batch) * size));
  return {static_cast<char*>(memory->data()) - begin * of_token * size, dtype, of_batch, of_token, 1};
}

void ProblemOnDevice::SplitTokens(const Context& ctx) {
  const Problem& p = given_;
  const int64_t of_write = p.key_heads * p.key_size;
  moved_->k = RowsIn(keys_, p.dtype, 2 * of_write);
  moved_->read_key = RowsIn(read_keys_, p.dtype, 2 * of_write);
  for (Rows* rows : {&moved_->k, &moved_->read_key}) {
    rows->head_stride = p.key_size;
    rows->write_stride = of_write;
  }
  moved_->writes = 2;
  if (p.value_heads == 0) return;
  const Launcher launcher(ctx, p);
  launcher.Run(launcher.kernels().split, p.sequences,
               {.k = p.k, .v = p.write_key, .read_key = p.read_key, .to = moved_->k}, p.key_heads,
               SplitParams{.k = OnDevice(p.k),
                           .b = OnDevice(p.write_key),
                           .a = OnDevice(p.read_key),
                           .keys = OnDevice(moved_->k),
                           .read_keys = OnDevice(moved_->read_key),
                           .size = static_cast<int32_t>(p.key_size)});
}

void ProblemOnDevice::TakeFactors(const Context& ctx) {
  const Problem& p = given_;
  if (p.value_heads == 0) return;
  const Launcher launcher(ctx, p);
  const auto multiply = [&](std::optional<heed::cuda::DeviceMemory>& memory, const Rows& a, int64_t group,
                            const Rows& b, int64_t size) {
    Rows to = RowsIn(memory, DType::kF32, p.value_heads * size);
    to.head_stride = size;
    launcher.Run(
        launcher.kernels().multiply, p.sequences, {.q = a, .k = b, .to = to}, p.value_heads,
        MultiplyParams{
            .a = OnDevice(a, group), .b = OnDevice(b), .to = OnDevice(to), .size = static_cast<int32_t>(size)});
    return to;
  };
  if (p.erase.data != nullptr) moved_->read_key = multiply(read_keys_, p.k, p.group(), p.erase, p.key_size);
  if (p.write.data != nullptr) moved_->v = multiply(values_, p.v, 1, p.write, p.value_size);
}

Problem FormOnDevice(const Problem& p) {
  Problem form = p;
  if (p.erase.data != nullptr) form.read_key = {p.erase.data, DType::kF32};
  if (p.write.data != nullptr) form.v = {p.write.data, DType::kF32};
  return form;
}

void ProblemOnDevice::TakeGates(const Context& ctx) {
  const Problem& p = given_;
  moved_->gate = Gate::kScalar;
  moved_->log_decay = RowsIn(decays_, DType::kF32, p.value_heads);
  moved_->value_factors = RowsIn(factors_, DType::kF32, p.value_heads);
  const Launcher launcher(ctx, p);
  floors_.emplace(*call_, true, launcher.tokens() * p.value_heads);
  if (p.value_heads == 0) return;
  launcher.RunOnHeads(launcher.kernels().gates, {.q = p.input_gate, .k = p.forget_gate, .to = moved_->log_decay},
                      GateParams{.input_gate = OnDevice(p.input_gate),
                                 .forget_gate = OnDevice(p.forget_gate),
                                 .log_decay = OnDevice(moved_->log_decay),
                                 .factors = OnDevice(moved_->value_factors),
                                 .floors = floors_->data(),
                                 .initial = static_cast<const float*>(p.initial_m.data),
                                 .final = static_cast<float*>(const_cast<void*>(p.final_m.data)),
                                 .initial_stride = p.initial_m.sequence_stride,
                                 .initial_head_stride = p.initial_m.head_stride,
                                 .final_stride = p.final_m.sequence_stride,
                                 .final_head_stride = p.final_m.head_stride,
                                 .value_heads = static_cast<int32_t>(p.value_heads)});
}

}  // namespace heed::recurrence::cuda
