// A call on a sequence: its checks, on which all ranks agree, and how it is cut.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/distributed/plan_internal.h"
#include "heed/engines/recurrence/problem.h"

namespace heed::distributed {
namespace {

// The segments of ranks with these numbers of tokens, in the order of processing; at least one. Without `segment` each
// rank's tokens are one.
std::vector<Part> Cut(const std::vector<int64_t>& counts, std::optional<int64_t> segment, bool backwards) {
  std::vector<Part> parts;
  int64_t begin = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    const int64_t end = begin + counts[rank];
    while (begin < end) {
      const int64_t next = segment ? std::min(end, (begin / *segment + 1) * *segment) : end;
      parts.push_back({static_cast<int>(rank), begin, next});
      begin = next;
    }
  }
  if (parts.empty()) parts.push_back({0, 0, 0});
  if (backwards) std::ranges::reverse(parts);
  return parts;
}

}  // namespace

int64_t SequencePlan::SizeOfAxis(char letter) const {
  for (size_t i = 0; i < of_.table.tensors.size(); ++i) {
    const ConstTensorView& t = At(in_.tensors, i);
    if (const int axis = mechanism::AxisOf(of_.table.tensors[i], t, letter); axis >= 0) return t.size(axis);
  }
  return -1;
}

void SequencePlan::FindShapes() {
  const ConstTensorView& packed = of_.numbers.cu_seqlens;
  const int64_t sequences = packed.present() ? packed.size(0) - 1 : SizeOfAxis('B');
  wide_ = in_.tensors[0].dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  states_.clear();
  transitions_.clear();
  for (size_t i = 0; i < of_.table.states.size(); ++i) {
    states_.emplace_back();
    transitions_.emplace_back();
    if (!exists_[i]) continue;
    Shape shape;
    for (const char letter : std::string_view(of_.table.states[i].axes)) {
      int64_t size = -1;
      if (letter == 'B') {
        size = sequences;
      } else if (letter == '2') {
        size = 2;
      } else if (letter == 'w') {
        size = SizeOfAxis('W') - 1;
      } else if (letter == 'F') {  // rows of random features, or features of K channels
        size = SizeOfAxis('M');
        const auto feature = of_.taylor ? recurrence::Feature::kTaylor : recurrence::Feature::kIdentity;
        if (size < 0) size = recurrence::FeatureSize(feature, SizeOfAxis('K'));
      } else {
        size = SizeOfAxis(letter);
      }
      shape.push_back(std::max<int64_t>(size, 0));
    }
    const ConstTensorView state(nullptr, wide_, shape);
    states_[i] = shape;
    const Shape transition = mechanism::TransitionShape(of_.table, in_, i, state);
    if (!transition.empty()) transitions_[i] = transition;
  }
}

void SequencePlan::CheckValues() const {
  for (size_t i = 0; i < of_.table.tensors.size(); ++i) {
    const Tensor& tensor = of_.table.tensors[i];
    const ConstTensorView& t = At(in_.tensors, i);
    if (!t.present() || (tensor.values != mechanism::kDecays && tensor.values != mechanism::kRates)) continue;
    const Bytes packed = Packed(t);
    for (int64_t at = 0; at < t.num_elements(); ++at) {
      const double value = LoadAsDouble(t.dtype(), packed.data(), at);
      if (!(value <= 0)) Refuse(op_, tensor.name, "has an element " + std::to_string(value), "<= 0 everywhere");
    }
  }
}

std::string SequencePlan::Describe(const Context& ctx, bool backward) {
  const auto& table = of_.table;
  if (options_.segment < 1) Refuse(op_, "segment", "is " + std::to_string(options_.segment), "1 or more");
  if (!of_.causal) throw Unsupported(op_ + ": causal is false, expected true with a group: all tokens see each other");
  std::string text = op_ + "(";
  for (size_t i = 0; i < table.tensors.size(); ++i) {
    const ConstTensorView& t = At(in_.tensors, i);
    const char* const name = table.tensors[i].name;
    CheckOnCpu(op_, name, t);
    if (!t.present()) continue;
    text +=
        (text.back() == '(' ? "" : ", ") + Described(name, t, axes_[i] < 0 ? std::nullopt : std::optional(axes_[i]));
  }
  for (const auto& [name, t] : {std::pair("lengths", of_.numbers.lengths), std::pair("starts", of_.numbers.starts),
                                std::pair("cu_seqlens", of_.numbers.cu_seqlens)}) {
    if (!t.present()) continue;
    CheckOnCpu(op_, name, t);
    if (t.rank() != 1 || (t.dtype() != DType::kI32 && t.dtype() != DType::kI64) || t.data() == nullptr) {
      Refuse(op_, name, std::string("is ") + Name(t.dtype()) + " " + t.ShapeString(), "i32 or i64 numbers");
    }
    text += ", " + Described(name, t, std::nullopt);
  }
  const auto present = [](const auto& views) {
    return std::ranges::any_of(views, [](const auto& t) { return t.present(); });
  };
  if (group_.rank() != first_rank() && (present(in_.initial) || (backward && present(out_.states)))) {
    Refuse(op_, "the initial state", "is given on rank " + std::to_string(group_.rank()),
           "none but on rank " + std::to_string(first_rank()));
  }

  // A call without tokens checks all but their number.
  const PartNumbers numbers(of_.numbers, {0, 0, 0});
  std::vector<ConstTensorView> tensors;
  for (size_t i = 0; i < table.tensors.size(); ++i) tensors.push_back(Tokens(At(in_.tensors, i), axes_[i], 0, 0));
  Context one(1);
  const ConstTensorView& o = backward ? in_.d_o : out_.o;
  const char* const o_name = backward ? "d_o" : "o";
  if (backward) {
    std::vector<TensorView> gradients;
    for (size_t i = 0; i < out_.gradients.size(); ++i) {
      gradients.push_back(axes_[i] < 0 ? TensorView() : Tokens(out_.gradients[i], axes_[i], 0, 0));
    }
    of_.backward(one, {tensors, in_.initial, Tokens(in_.d_o, o_axis_, 0, 0), in_.d_final}, numbers.views,
                 {{}, {}, gradients});
    text += ", " + Described("d_o", in_.d_o, o_axis_);
  } else {
    of_.forward(one, {tensors, in_.initial}, numbers.views, {Tokens(out_.o, o_axis_, 0, 0)});
  }
  for (size_t i = 0; i < table.tensors.size(); ++i) {
    const ConstTensorView& t = At(in_.tensors, i);
    if (axes_[i] < 0 || t.size(axes_[i]) == tokens_) continue;
    Refuse(op_, table.tensors[i].name, "has shape " + t.ShapeString(),
           std::to_string(tokens_) + " tokens as in " + table.tensors[0].name);
  }
  if (o.size(o_axis_) != tokens_) {
    Refuse(op_, o_name, "has shape " + o.ShapeString(), std::to_string(tokens_) + " tokens");
  }
  if (ctx.checks()) CheckValues();
  FindShapes();
  const auto check = [&](const std::string& name, const TensorView& t, DType dtype, std::span<const int64_t> sizes) {
    CheckOnCpu(op_, name, t);
    if (t.dtype() == dtype && std::ranges::equal(t.sizes(), sizes)) return;
    Refuse(op_, name, std::string("is ") + Name(t.dtype()) + " " + t.ShapeString(),
           std::string(Name(dtype)) + " " + ShapeString(sizes));
  };
  for (size_t i = 0; i < out_.states.size(); ++i) {
    if (!out_.states[i].present()) continue;
    const std::string name = std::string(backward ? "gradient of initial." : "final.") + table.states[i].name;
    if (backward ? !MayHaveGradient(i) : !exists_[i]) {
      Refuse(op_, name, "is given", backward ? "none: it is a constant" : "none: this call has no such state");
    }
    check(name, out_.states[i], wide_, *states_[i]);
  }
  std::vector<ConstTensorView> inputs(in_.tensors.begin(), in_.tensors.end());
  inputs.insert(inputs.end(), in_.initial.begin(), in_.initial.end());
  inputs.insert(inputs.end(), in_.d_final.begin(), in_.d_final.end());
  inputs.push_back(in_.d_o);
  std::vector<TensorView> outputs(out_.states.begin(), out_.states.end());
  outputs.insert(outputs.end(), out_.gradients.begin(), out_.gradients.end());
  outputs.push_back(out_.o);
  for (size_t i = 0; i < out_.gradients.size(); ++i) {
    if (!out_.gradients[i].present()) continue;
    const ConstTensorView& t = At(in_.tensors, i);
    if (!t.present()) Refuse(op_, std::string("gradient of ") + table.tensors[i].name, "is given", "none");
    check(std::string("gradient of ") + table.tensors[i].name, out_.gradients[i], t.dtype(), t.sizes());
  }
  CheckApart(op_, inputs, outputs);
  text += of_.options + ", segment=" + (relay_ ? "none" : std::to_string(options_.segment));
  if (!options_.note.empty()) text += ", " + options_.note;
  text += std::string(options_.states == nullptr ? "" : ", states kept") + ") heed " + HEED_VERSION;
  return text;
}

void SequencePlan::CheckNumbers(int64_t total) const {
  for (const auto& [name, t] : {std::pair("lengths", of_.numbers.lengths), std::pair("starts", of_.numbers.starts),
                                std::pair("cu_seqlens", of_.numbers.cu_seqlens)}) {
    if (!t.present() || t.size(0) == 0) continue;
    Shape numbers;
    for (int64_t i = 0; i < t.size(0); ++i) numbers.push_back(LoadAsInt64(t.dtype(), t.data(), i * t.stride(0)));
    const auto [low, high] = std::ranges::minmax(numbers);
    const bool offsets = std::string_view(name) == "cu_seqlens";
    const bool ordered = numbers.front() == 0 && numbers.back() == total && std::ranges::is_sorted(numbers);
    if (low >= 0 && high <= total && (!offsets || ordered)) continue;
    Refuse(op_, name, "is " + ShapeString(numbers),
           (offsets ? "0 to " + std::to_string(total) + " in ascending order"
                    : "numbers from 0 to " + std::to_string(total)) +
               ", the tokens of all ranks");
  }
}

void SequencePlan::CheckFirstTokens(bool has_initial) const {
  if (!of_.zeros_differ || has_initial || last_ == 0) return;
  const ConstTensorView &packed = of_.numbers.cu_seqlens, &lengths = of_.numbers.lengths, &starts = of_.numbers.starts;
  const auto number = [](const ConstTensorView& t, int64_t i) {
    return LoadAsInt64(t.dtype(), t.data(), i * t.stride(0));
  };
  const Part& first = parts_[0];
  const int64_t total = std::max(first.end, parts_[last_].end);
  const int64_t sequences = packed.present() ? packed.size(0) - 1 : SizeOfAxis('B');
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t begin = packed.present() ? number(packed, i) : starts.present() ? number(starts, i) : 0;
    const int64_t end = packed.present() ? number(packed, i + 1) : lengths.present() ? number(lengths, i) : total;
    const int64_t token = backwards_ ? end - 1 : begin;
    if (begin >= end || (first.begin <= token && token < first.end)) continue;
    throw Unsupported(op_ + ": sequence " + std::to_string(i) + " begins with token " + std::to_string(token) +
                      ", expected one of the first segment, tokens " + std::to_string(first.begin) + " to " +
                      std::to_string(first.end) + ", without an initial state");
  }
}

void SequencePlan::Start(const Context& ctx, bool backward) {
  const auto bits = [](const auto& views) {
    int64_t mask = 0;
    for (size_t i = 0; i < views.size(); ++i) mask |= static_cast<int64_t>(views[i].present()) << i;
    return mask;
  };
  const Numbers own = {tokens_, bits(in_.initial) | (backward ? bits(out_.states) : 0),
                       backward ? bits(in_.d_final) : bits(out_.states), bits(in_.initial)};
  agreed_ = Agree(group_, op_, own, [&] { return Describe(ctx, backward); });
  if (!of_.causal) throw Unsupported(op_ + ": causal is false, expected true with a group: all tokens see each other");
  std::vector<int64_t> counts;
  int64_t total = 0;
  for (const Numbers& numbers : agreed_) {
    if (static_cast<int>(counts.size()) == group_.rank()) begin_ = total;
    counts.push_back(numbers[0]);
    total += numbers[0];
  }
  CheckNumbers(total);
  FindShapes();
  parts_ = Cut(counts, relay_ ? std::nullopt : std::optional(options_.segment), backwards_);
  last_ = parts_.size() - 1;
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (IsOwn(i)) own_.push_back(i);
  }
  const int first = first_rank();
  if (agreed_[static_cast<size_t>(first)][1] != 0 && parts_[0].rank != first) {
    throw Unsupported(op_ + ": rank " + std::to_string(first) + " has an initial state and no tokens, expected some");
  }
  CheckFirstTokens(agreed_[static_cast<size_t>(first)][3] != 0);
  summed_.resize(of_.table.tensors.size());
}

}  // namespace heed::distributed
