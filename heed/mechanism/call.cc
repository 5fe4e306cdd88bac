// The checks of calls that all engines share.
#include "heed/mechanism/call_internal.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "heed/core/error.h"

namespace heed::mechanism {
namespace {

bool IsOverTokens(std::string_view axes) { return axes.find('T') != std::string_view::npos; }

// "rank 4: [B, T, H, K]", or without the rank.
std::string Expected(const Tensor& tensor, AxisName name, bool says_rank) {
  const std::string_view axes = tensor.axes;
  std::string text = says_rank ? "rank " : "";
  if (says_rank) text += std::to_string(axes.size()) + ": ";
  text += Described(axes, name);
  if (axes.find('W') != std::string_view::npos) text += " with W >= 1";
  return text;
}

// The dtypes that a tensor of these axes may have, beside that of the first tensor.
bool MayHave(const Tensor& tensor, std::string_view axes, DType dtype, DType states) {
  if (tensor.type == kAnyFloat && !IsOverTokens(axes)) return IsFloat(dtype);
  return tensor.type != kSame && dtype == states;
}

}  // namespace

std::string Described(std::string_view axes, AxisName name) {
  std::string text = "[";
  for (const char letter : axes) {
    if (letter == '|') {
      text += "], [";
      continue;
    }
    if (text.back() != '[') text += ", ";
    text += name(letter);
  }
  text += "]";
  if (const size_t at = text.rfind("], ["); at != std::string::npos) text.replace(at, 3, "] or ");
  return text;
}

ConstTensorView WithToken(const char* op, const Tensor& tensor, AxisName name, const ConstTensorView& t, int64_t batch,
                          int64_t channels) {
  if (!t.present() || !tensor.over_tokens()) return t;
  const std::string_view axes = AxesOfRank(tensor.axes, t.rank() + 1), constant = AxesOfRank(tensor.axes, t.rank());
  const bool may_be_token = IsOverTokens(axes);
  if (!constant.empty() && !IsOverTokens(constant)) {
    if (!may_be_token || (t.size(0) == channels && channels != batch)) return t;
    if (t.size(0) == channels) {
      Fail(op, tensor.name, "has shape " + t.ShapeString(),
           "[B, 1, N] or [B, D, N], as B = D and it may be of sequences or of channels");
    }
  }
  if (!may_be_token) {
    std::string expected = tensor.axes;
    std::erase(expected, 'T');
    Fail(op, tensor.name, "has shape " + t.ShapeString(), "one token of each sequence: " + Described(expected, name));
  }
  Axes sizes, strides;
  int axis = 0;
  for (const char letter : axes) {
    sizes.Append(letter == 'T' ? 1 : t.size(axis));
    strides.Append(letter == 'T' ? 0 : t.stride(axis));
    if (letter != 'T') ++axis;
  }
  return {t.data(), t.dtype(), sizes, strides, t.device()};
}

void Call::ReadSizes(const char* op, const Table& table, const Arguments& in, AxisName name, bool says_rank,
                     std::initializer_list<Leading> leading) {
  std::vector<TokenRange> memory = std::move(ranges);
  memory.clear();
  *this = {};
  ranges = std::move(memory);
  const ConstTensorView& first = At(in.tensors, 0);
  if (!first.present()) Fail(op, table.tensors[0].name, "is absent", "a tensor");
  if (!IsFloat(first.dtype())) {
    Fail(op, table.tensors[0].name, std::string("has dtype ") + Name(first.dtype()), "f64, f32, bf16 or f16");
  }
  dtype = o_dtype = first.dtype();
  if (first.device().type == DeviceType::kCuda) device = first.device();
  const auto read = [&](const Tensor& tensor, std::string_view letters) {
    const ConstTensorView& t = At(in.tensors, table.IndexOf(tensor));
    if (!t.present() && tensor.optional) return;
    if (!t.present()) Fail(op, tensor.name, "is absent", "a tensor");
    const std::string_view axes = AxesOfRank(tensor.axes, t.rank());
    if (axes.empty()) Fail(op, tensor.name, "has shape " + t.ShapeString(), Expected(tensor, name, says_rank));
    if (axes == "BNT" && sizes.G < 0) sizes.G = 1;
    for (size_t i = 0; i < axes.size(); ++i) {  // sizes that are not known yet
      if (letters.find(axes[i]) == std::string_view::npos) continue;
      if (sizes[axes[i]] < 0) sizes[axes[i]] = t.size(static_cast<int>(i));
    }
  };
  for (const auto& [tensor, axes] : leading) read(*tensor, axes);
  for (const Tensor& tensor : table.tensors) read(tensor, tensor.axes);
}

void Call::CheckTensors(const char* op, const Table& table, const Arguments& in, bool data, bool host_decays,
                        bool values) const {
  for (const Tensor& tensor : table.tensors) {
    const ConstTensorView& t = At(in.tensors, table.IndexOf(tensor));
    if (!t.present()) continue;
    const std::string_view axes = AxesOfRank(tensor.axes, t.rank());
    const bool own = MayHave(tensor, axes, t.dtype(), state_dtype());
    const DType expected = tensor.values == kMask ? DType::kBool : own ? t.dtype() : dtype;
    const bool on_host = host_decays && tensor.values == kDecays && !tensor.over_tokens();
    CheckTensor(op, tensor.name, t, ShapeOf(axes, sizes), expected, data, on_host ? Device() : device);
    const bool decays = tensor.values == kDecays || tensor.values == kRates;
    if (decays && values && t.data() != nullptr && t.device().type == DeviceType::kCpu) {
      CheckNotPositive(op, tensor.name, t);
    }
  }
}

void Call::FindSequences(const char* op, const Table& table, const Arguments& in, const Sequences& sequences, bool data,
                         int64_t features) {
  const Tensor& first = table.tensors[0];
  const auto token_axis = static_cast<int>(std::string_view(first.axes).find('T'));
  Ranges(op, first.name, in.tensors[0], token_axis, sequences, data, ranges);
  o_shape = ShapeOf(o_axes, sizes);
  AxisSizes of_states = sizes;
  of_states.B = static_cast<int64_t>(ranges.size());
  of_states.F = features;
  for (size_t i = 0; i < table.states.size(); ++i) {
    if (has_state[i]) state_shapes[i] = ShapeOf(table.states[i].axes, of_states);
  }
  clears_others = sequences.cut == nullptr;
  if (clears_others) return;
  sequences.cut->state_dtype = state_dtype();
  sequences.cut->state_shapes.clear();
  for (size_t i = 0; i < table.states.size(); ++i) {
    sequences.cut->state_shapes.emplace_back(has_state[i] ? std::vector<int64_t>(state_shapes[i])
                                                          : std::vector<int64_t>());
  }
}

void Call::CheckInitialStates(const char* op, const Table& table, const Arguments& in, bool data) const {
  ForStates(op, table, "initial_state", "is given", false, in.initial,
            [&](size_t i, const char* name, const ConstTensorView& t) {
              CheckTensor(op, name, t, state_shapes[i], state_dtype(), data, device);
            });
}

Apart Call::Readers(const Table& table, const Arguments& in, const Sequences& sequences) const {
  Apart apart(device);
  for (const Tensor& tensor : table.tensors) apart.Reads(tensor.name, At(in.tensors, table.IndexOf(tensor)));
  for (size_t i = 0; i < in.initial.size(); ++i) {
    apart.Reads(StateName("initial_state", table.states[i], num_states() > 1), in.initial[i]);
  }
  apart.Reads("lengths", sequences.lengths);
  apart.Reads("starts", sequences.starts);
  apart.Reads("cu_seqlens", sequences.cu_seqlens);
  return apart;
}

void Call::ClearOtherTokens(const TensorView& t, std::string_view axes) const {
  if (!clears_others || !on_cpu() || !t.present() || !IsOverTokens(axes)) return;
  const std::vector<TokenRange> none;
  ClearOthers(sizes.D == 0 ? none : ranges, t, static_cast<int>(axes.find('T')));
}

}  // namespace heed::mechanism
