// MechanismCall: a call through the registry, with its memory.
#include "cli/mechanism_call.h"

#include "cli/attention_call.h"

namespace heed::cli {

MechanismCall::MechanismCall(const Context& ctx, const OpEntry& op, const std::string& file, const TensorMap& tensors,
                             std::optional<double> scale)
    : file_(file), call_(Named(file, [&] { return op.call(ctx, tensors, scale); })) {
  for (const OutputSpec& spec : call_.outputs) {
    outputs_.emplace_back(spec.dtype, spec.sizes, Placement::kAligned);
  }
}

void MechanismCall::Forward(Context& ctx) const {
  std::vector<TensorView> views;
  for (const Buffer& output : outputs_) views.push_back(output.view());
  Named(file_, [&] { call_.run(ctx, views); });
}

std::vector<NamedTensor> MechanismCall::Outputs(bool batched) const {
  std::vector<NamedTensor> named;
  for (size_t i = 0; i < outputs_.size(); ++i) {
    named.push_back({call_.outputs[i].name, DropBatch(outputs_[i].view(), batched)});
  }
  return named;
}

int64_t MechanismCall::StateBytes() const {
  int64_t bytes = 0;
  for (size_t i = 1; i < outputs_.size(); ++i) {
    if (!call_.outputs[i].name.starts_with("state")) continue;
    const TensorView& view = outputs_[i].view();
    bytes += view.num_elements() * static_cast<int64_t>(SizeOf(view.dtype()));
  }
  return bytes;
}

}  // namespace heed::cli
