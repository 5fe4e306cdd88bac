// A call of a mechanism: the checks that all engines share. Engines derive their own call from it (recurrent.cc,
// scanning.cc), and passes-inl.h runs it.
#ifndef HEED_MECHANISM_CALL_INTERNAL_H_
#define HEED_MECHANISM_CALL_INTERNAL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/context.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/table_internal.h"
#include "heed/mechanism/tokens_internal.h"

namespace heed::mechanism {

inline constexpr size_t kMaxStates = 4;

// The names of axes in messages, where they are not their letters.
using AxisName = std::string (*)(char letter);

// "[B, G, N, T], [B, N, T] or [D, N]".
std::string Described(std::string_view axes, AxisName name);

// [B, D] as [B, D, 1] for a tensor of axes BDT, and so on; constants unchanged. Where [B, N] may also be [D, N], the
// first axis decides, given `batch` sequences and `channels` channels.
ConstTensorView WithToken(const char* op, const Tensor& tensor, AxisName name, const ConstTensorView& t, int64_t batch,
                          int64_t channels);

// A name of a state in messages, "initial_state" or "initial_state.z", in fixed memory, since a step allocates nothing.
class StateName {
 public:
  StateName(const char* what, const StateTensor& state, bool one_of_several) {
    std::snprintf(name_, sizeof(name_), "%s%s%s", what, one_of_several ? "." : "", one_of_several ? state.name : "");
  }
  operator const char*() const { return name_; }  // NOLINT: a name

 private:
  char name_[32];
};

// The arguments of a call determine these.
struct Call {
  DType dtype = DType::kF32;    // of the first tensor
  DType o_dtype = DType::kF32;  // of o and d_o
  Device device;                // the CPU, or the GPU of the first tensor
  AxisSizes sizes;
  bool reverse = false;
  bool clears_others = true;  // false for some segments of a call
  std::vector<TokenRange> ranges;
  const char* o_axes = "";
  Axes o_shape;
  std::array<bool, kMaxStates> has_state = {};
  std::array<Axes, kMaxStates> state_shapes;

  DType state_dtype() const { return StateDType(dtype); }
  bool on_cpu() const { return device.type == DeviceType::kCpu; }
  int num_states() const { return static_cast<int>(std::ranges::count(has_state, true)); }

  // Finds dtype, device and sizes from the ranks and shapes of the tensors, first of these axes of the `leading` ones;
  // resets everything else but the memory of lists. Messages name the rank with `says_rank`.
  struct Leading {
    const Tensor* tensor;
    std::string_view axes;
  };
  void ReadSizes(const char* op, const Table& table, const Arguments& in, AxisName name, bool says_rank,
                 std::initializer_list<Leading> leading = {});
  // Checks presence, dtype, shape and device of the tensors. `host_decays`: constant decays are on the CPU. With
  // `values`, decays and rates are at most 0.
  void CheckTensors(const char* op, const Table& table, const Arguments& in, bool data, bool host_decays,
                    bool values) const;
  // Finds the sequences, and the shapes of o and of states, `features` rows of which have the axis F.
  void FindSequences(const char* op, const Table& table, const Arguments& in, const Sequences& sequences, bool data,
                     int64_t features);
  void CheckInitialStates(const char* op, const Table& table, const Arguments& in, bool data) const;

  // Calls f(i, name, view) for the states that are present; throws for those that the call does not have, and with
  // `gradients` for constants.
  template <class View, class F>
  void ForStates(const char* op, const Table& table, const char* what, const char* verb, bool gradients,
                 std::span<const View> views, const F& f) const {
    for (size_t i = 0; i < views.size(); ++i) {
      if (!views[i].present()) continue;
      const StateName name(what, table.states[i], num_states() > 1 || table.states[i].role != StateTensor::kState);
      if (gradients && !table.states[i].differentiable()) Fail(op, name, verb, "none: it is a constant");
      if (!has_state[i]) Fail(op, name, verb, "none: this call has no such state");
      f(i, name, views[i]);
    }
  }

  // All inputs, for the overlap checks of outputs.
  Apart Readers(const Table& table, const Arguments& in, const Sequences& sequences) const;

  // Calls f(b, first, count) for tokens that belong to no sequence, in the order of processing.
  template <class F>
  void ForOtherTokens(const F& f) const {
    const std::vector<TokenRange> none;
    ForOthers(sizes.D == 0 ? none : ranges, sizes.B, sizes.T,
              [&](int64_t b, int64_t begin, int64_t end) { f(b, reverse ? 1 - end : begin, end - begin); });
  }
  // Clears tokens that belong to no sequence, and all tokens of calls without channels, which have no task. Kernels of
  // devices clear these themselves.
  void ClearOtherTokens(const TensorView& t, std::string_view axes) const;
};

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_CALL_INTERNAL_H_
